"""Images and videos of any layout, brought to one: RGB frames (H, W, 3), uint8, rounded once, here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rewards.request import LabelError, RewardRequest

Frame = NDArray[np.uint8]


def to_frames(image: Any, num_frames: int | None = None) -> list[Frame]:
    """The frames of an image (one) or a video.

    Args:
        image: A `PIL.Image`; an array or tensor (H, W), CHW or HWC with 1, 3 or 4 channels, float in [0, 1] or uint8;
            or a video: a list of those, or an array (T, C, H, W) or (T, H, W, C). Alpha is dropped, grey is repeated,
            floats are clamped, NaN is black, and the result is rounded to the nearest integer (0.5 is 128).
        num_frames: Take so many frames of a video, evenly spaced with the first and the last; `None` takes all.

    Returns:
        At least one frame (H, W, 3), uint8.

    Raises:
        ValueError: It is no image.
    """
    if image is None:
        raise ValueError("there is no image")
    if isinstance(image, list | tuple):
        frames = list(image)
    else:
        array = _array(image)
        frames = list(array) if array.ndim == 4 else [array]
    if not frames:
        raise ValueError("the video has no frames")
    return [_frame(_array(frame)) for frame in sample_evenly(frames, num_frames)]


def request_frames(request: RewardRequest, num_frames: int | None = None) -> list[Frame]:
    """The frames of a request's image or video.

    Raises:
        LabelError: It has none that can be read; the message names the sample.
    """
    try:
        return to_frames(request.image, num_frames)
    except (ValueError, TypeError, OSError) as error:
        raise LabelError(f"sample {request.sample_id}: {error}") from error


def request_image(request: RewardRequest, reward: str) -> Frame:
    """The one image of a request, for scorers that take no video.

    Raises:
        LabelError: It has none, or it has a video.
    """
    frames = request_frames(request)
    if len(frames) > 1:
        raise LabelError(f"sample {request.sample_id} is a video of {len(frames)} frames, and {reward} scores images")
    return frames[0]


def request_prompt(request: RewardRequest, reward: str) -> str:
    """The prompt of a request.

    Raises:
        LabelError: It has none.
    """
    if not isinstance(request.prompt, str) or not request.prompt:
        raise LabelError(f"sample {request.sample_id} has no prompt, and the {reward} reward compares with it")
    return request.prompt


def sample_evenly(frames: Sequence[Any], count: int | None) -> list[Any]:
    """`count` frames at equal distances, the first and the last among them; all where there are no more than that."""
    if count is not None and count < 1:
        raise ValueError(f"num_frames must be at least 1, not {count}")
    if count is None or count >= len(frames):
        return list(frames)
    if count == 1:
        return [frames[len(frames) // 2]]
    return [frames[round(index * (len(frames) - 1) / (count - 1))] for index in range(count)]


def _array(image: Any) -> NDArray[Any]:
    if hasattr(image, "convert") and hasattr(image, "mode"):  # PIL
        return np.asarray(image.convert("RGB"))
    if hasattr(image, "detach"):  # torch
        image = image.detach().cpu()
        image = image.float() if image.is_floating_point() else image
        image = image.numpy()
    return np.asarray(image)


def _frame(array: NDArray[Any]) -> Frame:
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or 0 in array.shape:
        raise ValueError(f"an image has two or three dimensions and no empty one, not shape {array.shape}")
    array = array if _channels_last(array.shape) else array.transpose(1, 2, 0)
    array = array[:, :, :3] if array.shape[2] == 4 else array
    array = np.broadcast_to(array, (*array.shape[:2], 3))
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    if not np.issubdtype(array.dtype, np.floating):
        raise ValueError(f"an image is float in [0, 1] or uint8, not {array.dtype}")
    levels = np.clip(np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=1.0, neginf=0.0), 0.0, 1.0) * 255.0
    return np.floor(levels + 0.5).astype(np.uint8)


def _channels_last(shape: tuple[int, ...]) -> bool:
    """Whether an image is HWC. Where both ends could be channels, three of them count for more than four or one."""
    first, last = shape[0], shape[2]
    for channels in (3, 4, 1):
        if last == channels:
            return True
        if first == channels:
            return False
    raise ValueError(f"an image has 1, 3 or 4 channels first or last, not shape {shape}")
