"""`ocr`: is the text that the prompt asks for in the image?"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from rewards.image.pixels import Frame, request_frames
from rewards.request import LabelError, MissingExtraError, RewardRequest, Score

logger = logging.getLogger(__name__)


class OcrScorer:
    """1 if the recognised text contains the target, else 1 − min(lev, n)/n, n the length of the target.

    The target is the text between the first two double quotes of the prompt. Target and recognised text are lower-cased
    and lose every space; the lines that were recognised are joined in reading order. Nothing recognised scores 0, and
    so does an image that the engine fails on (logged). A video scores the mean over its frames.

    Args:
        engine: `rapidocr` (PP-OCRv4, in its wheel) or `paddleocr`.
        num_frames: Frames of a video, evenly spaced; `None` reads every one.
        engine_options: Keyword arguments of the engine's constructor, over the defaults here.
    """

    def __init__(
        self,
        engine: Literal["rapidocr", "paddleocr"] = "rapidocr",
        num_frames: int | None = None,
        engine_options: Mapping[str, Any] | None = None,
    ) -> None:
        if engine not in _ENGINES:
            raise ValueError(f"unknown OCR engine {engine!r}: {' or '.join(_ENGINES)}")
        self._recognise = _ENGINES[engine](dict(engine_options or {}))
        self._num_frames = num_frames

    def __call__(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """One score in [0, 1] a request.

        Raises:
            LabelError: A prompt without quoted text, or a request without an image; the message names the sample.
        """
        targets = [quoted_target(request) for request in requests]  # all of them, before any work
        return [self._score(request, target) for request, target in zip(requests, targets, strict=True)]

    def _score(self, request: RewardRequest, target: str) -> float:
        scores = [text_score(self._text(frame, request), target) for frame in request_frames(request, self._num_frames)]
        return sum(scores) / len(scores)

    def _text(self, frame: Frame, request: RewardRequest) -> str:
        try:
            return self._recognise(_not_too_long(frame))
        except Exception:  # engines raise anything on images of odd sizes
            logger.warning("no text could be recognised in sample %s", request.sample_id, exc_info=True)
            return ""


def _not_too_long(frame: Frame) -> Frame:
    """The frame, with black added below or beside it until one side is at most eight times the other.

    Engines enlarge an image until its shorter side is 256 pixels, which makes an image of one row enormous.
    """
    height, width = frame.shape[:2]
    shortest = -(-max(height, width) // 8)
    return np.pad(frame, ((0, max(0, shortest - height)), (0, max(0, shortest - width)), (0, 0)))


def quoted_target(request: RewardRequest) -> str:
    """The text between the first two double quotes of the prompt, lower-cased, without spaces.

    Raises:
        LabelError: There is none.
    """
    parts = (request.prompt or "").split('"')
    if len(parts) < 3 or not normalize(parts[1]):
        raise LabelError(
            f"sample {request.sample_id}: the ocr reward needs text between double quotes in the prompt, "
            f"not {request.prompt!r:.200}"
        )
    return normalize(parts[1])


def normalize(text: str) -> str:
    """Lower case, without any white space."""
    return "".join(text.lower().split())


def text_score(recognised: str, target: str) -> float:
    """1 if `target` is in `recognised`, else 1 − min(lev, n)/n; both normalised here.

    Args:
        recognised: What the engine read.
        target: What should stand there; not empty.
    """
    recognised, target = normalize(recognised), normalize(target)
    if target in recognised:
        return 1.0
    return 1.0 - min(levenshtein(recognised, target, len(target)), len(target)) / len(target)


def levenshtein(left: str, right: str, limit: int) -> int:
    """Edit distance (insert, delete, substitute), or `limit` if it is at least that."""
    if abs(len(left) - len(right)) >= limit:
        return limit
    previous = list(range(len(right) + 1))
    for row, character in enumerate(left, start=1):
        current = [row]
        for column, other in enumerate(right, start=1):
            substituted = previous[column - 1] + (character != other)
            current.append(min(previous[column] + 1, current[-1] + 1, substituted))
        previous = current
    return min(previous[-1], limit)


def _rapidocr(options: dict[str, Any]) -> Callable[[Frame], str]:
    try:
        from rapidocr_onnxruntime import RapidOCR
    except ImportError as error:
        raise MissingExtraError(
            f"the ocr reward needs {error.name}: install the extra with `uv pip install 'tandem-rewards[ocr]'`."
        ) from error
    # One thread: workers are processes, and several engines with a thread for each core slow each other down.
    defaults = {
        "det_limit_side_len": 256,
        "det_limit_type": "min",
        "intra_op_num_threads": 1,
        "inter_op_num_threads": 1,
    }
    engine = RapidOCR(**{**defaults, **options})

    def recognise(frame: Frame) -> str:
        lines, _ = engine(frame[:, :, ::-1], use_cls=False)  # BGR
        return " ".join(line[1] for line in lines or [])

    return recognise


def _paddleocr(options: dict[str, Any]) -> Callable[[Frame], str]:
    os.environ.setdefault("PADDLE_PDX_DISABLE_MODEL_SOURCE_CHECK", "True")  # else importing it goes to the network
    try:
        from paddleocr import PaddleOCR
    except ImportError as error:
        raise MissingExtraError(
            f"the ocr engine paddleocr needs {error.name}: install `uv pip install 'tandem-rewards[paddleocr]'`."
        ) from error
    defaults = {
        "use_doc_orientation_classify": False,
        "use_doc_unwarping": False,
        "use_textline_orientation": False,
        "enable_mkldnn": False,
        "cpu_threads": 1,
        "lang": None if "text_recognition_model_dir" in options else "en",
    }
    engine = PaddleOCR(**{**defaults, **options})

    def recognise(frame: Frame) -> str:
        pages = engine.predict(frame[:, :, ::-1].copy())  # BGR
        return " ".join(text for page in pages for text in page["rec_texts"])

    return recognise


_ENGINES: dict[str, Callable[[dict[str, Any]], Callable[[Frame], str]]] = {
    "rapidocr": _rapidocr,
    "paddleocr": _paddleocr,
}
