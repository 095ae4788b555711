"""Requests as JSON, as `rewards serve` takes them: images travel as base64 PNG."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rewards.request import RewardRequest

FIELDS = tuple(field.name for field in fields(RewardRequest))


def to_wire(request: RewardRequest) -> dict[str, Any]:
    """The JSON of a request: fields that are `None` are left out; a video is a list of images."""
    data = {name: value for name in FIELDS if name != "image" and (value := getattr(request, name)) is not None}
    if request.tokens is not None:
        data["tokens"] = [int(token) for token in request.tokens]
    if request.metadata is not None:
        data["metadata"] = dict(request.metadata)
    if request.image is not None:
        from rewards.image.pixels import to_frames

        frames = [encode_png(frame) for frame in to_frames(request.image)]
        data["image"] = frames[0] if len(frames) == 1 else frames
    return data


def from_wire(data: Mapping[str, Any]) -> RewardRequest:
    """The request of a JSON object.

    Raises:
        ValueError: An unknown field, or an image that is no base64 of an image file.
    """
    unknown = set(data) - set(FIELDS)
    if unknown:
        raise ValueError(f"unknown field {sorted(unknown)[0]!r}; known: {', '.join(FIELDS)}")
    values = dict(data)
    image = values.get("image")
    if image is not None:
        values["image"] = [decode_image(frame) for frame in image] if isinstance(image, list) else decode_image(image)
    return RewardRequest(**values)


def encode_png(array: Any) -> str:
    """Base64 of the PNG of an image (H, W, 3), uint8."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, format="PNG", compress_level=1)
    return base64.b64encode(buffer.getvalue()).decode()


def decode_image(text: str) -> Any:
    """The image of a base64 string, with or without a `data:` prefix.

    Raises:
        ValueError: It is no image.
    """
    from PIL import Image

    try:
        image = Image.open(io.BytesIO(base64.b64decode(text.rpartition(",")[2], validate=True)))
        image.load()
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"image is no base64 of an image file: {error}") from error
    return image
