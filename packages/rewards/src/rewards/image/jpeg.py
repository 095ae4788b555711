"""`jpeg_compressibility` and `jpeg_incompressibility`: the size of the image as a JPEG file."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rewards.image.pixels import Frame, request_frames
from rewards.request import RewardRequest, Score

_BYTES = 1000
_SCALE = 500.0
_QUALITY = 95


class JpegCompressibilityScorer:
    """−kB/500 of the JPEG at quality 95 (Black et al. 2023, https://arxiv.org/abs/2305.13301); kB is 1000 bytes.

    A video scores the mean over its frames.

    Args:
        num_frames: Frames of a video, evenly spaced; `None` scores every one.
    """

    sign = -1.0

    def __init__(self, num_frames: int | None = None) -> None:
        self._num_frames = num_frames

    def __call__(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """One score a request.

        Raises:
            LabelError: A request without an image.
        """
        return [self._score(request_frames(request, self._num_frames)) for request in requests]

    def _score(self, frames: list[Frame]) -> float:
        return self.sign * sum(jpeg_bytes(frame) for frame in frames) / len(frames) / _BYTES / _SCALE


class JpegIncompressibilityScorer(JpegCompressibilityScorer):
    """+kB/500 of the JPEG at quality 95: the opposite of `jpeg_compressibility`."""

    sign = 1.0


def jpeg_bytes(frame: Frame) -> int:
    """Size in bytes of an image (H, W, 3), uint8, as a JPEG at quality 95."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, format="JPEG", quality=_QUALITY)
    return buffer.tell()
