"""`shapes`: does the picture show the shape that its prompt asks for, in its colour, size and place?

The prompt is plain words, such as "a small red circle at the top left"; every asked property that a person would tick
off counts the same. The words, the colours and the outlines stand here for whoever draws such pictures.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rewards.image.pixels import Frame, request_image, request_prompt
from rewards.request import LabelError, RewardRequest, Score

COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.85, 0.15, 0.15),
    "green": (0.15, 0.65, 0.25),
    "blue": (0.15, 0.30, 0.85),
    "yellow": (0.95, 0.80, 0.10),
}
SHAPES = ("circle", "square", "triangle")
SIZES = ("small", "large")
ROWS = ("top", "bottom")
COLUMNS = ("left", "right")

PROPERTIES: dict[str, tuple[str, ...]] = {
    "color": tuple(COLORS),
    "shape": SHAPES,
    "size": SIZES,
    "row": ROWS,
    "column": COLUMNS,
}

LARGE_FROM = 0.195
"""Half the longer side of a large shape's box, as a part of the picture's side, is at least this."""

_MAX_SIDE = 64
_MIN_CHROMA = 0.15
_MIN_AREA = 0.005
_MAX_COLOR_DISTANCE = 0.4
_MIN_OVERLAP = 0.65
_MIN_COVERAGE = 0.35


@dataclass(frozen=True)
class Seen:
    """What a picture shows; a property that can't be told is `None`.

    Attributes:
        color: One of `COLORS`.
        shape: One of `SHAPES`.
        size: One of `SIZES`.
        row: One of `ROWS`.
        column: One of `COLUMNS`.
    """

    color: str | None = None
    shape: str | None = None
    size: str | None = None
    row: str | None = None
    column: str | None = None


class ShapesScorer:
    """The part of the asked properties (colour, shape, size, row, column) that the picture has.

    A request scores `{"score": part, "color": 0 or 1, ...}` with one entry for each property its prompt names.
    """

    def __call__(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """One score a request.

        Raises:
            LabelError: A request without an image, or whose prompt names no property, or two values of one.
        """
        return [self._score(request) for request in requests]

    def _score(self, request: RewardRequest) -> Score:
        try:
            asked = asked_properties(request_prompt(request, "shapes"))
        except ValueError as error:
            raise LabelError(f"sample {request.sample_id}: {error}") from error
        seen = look(request_image(request, "shapes"))
        hits = {name: float(getattr(seen, name) == value) for name, value in asked.items()}
        return {"score": sum(hits.values()) / len(hits), **hits}


def asked_properties(prompt: str) -> dict[str, str]:
    """The properties that a prompt names, in the order of `PROPERTIES`.

    Raises:
        ValueError: If it names none, or two values of one.
    """
    words = re.findall(r"[a-z]+", prompt.lower())
    asked: dict[str, str] = {}
    for name, values in PROPERTIES.items():
        named = {word for word in words if word in values}
        if len(named) > 1:
            raise ValueError(f"the prompt {prompt!r} asks for {' and '.join(sorted(named))} at once")
        if named:
            asked[name] = named.pop()
    if not asked:
        known = ", ".join(word for values in PROPERTIES.values() for word in values)
        raise ValueError(f"the prompt {prompt!r} names nothing that the shapes reward can see: {known}")
    return asked


def outline(
    shape: str, size: int, center: tuple[float, float], half: tuple[float, float], samples: int = 4
) -> NDArray[np.float64]:
    """How much of each pixel a shape covers.

    Args:
        shape: One of `SHAPES`; the triangle points up.
        size: Pixels a side.
        center: (x, y) of the box's centre, as parts of the side, (0, 0) is the top left corner.
        half: Half the box's width and height, likewise.
        samples: Points a pixel and direction.

    Returns:
        (size, size), rows first, in [0, 1].

    Raises:
        ValueError: For an unknown shape.
    """
    points = (np.arange(size * samples) + 0.5) / (size * samples)
    x = (points[None, :] - center[0]) / half[0]
    y = (points[:, None] - center[1]) / half[1]
    if shape == "circle":
        inside = x**2 + y**2 <= 1.0
    elif shape == "square":
        inside = (np.abs(x) <= 1.0) & (np.abs(y) <= 1.0)
    elif shape == "triangle":
        inside = (np.abs(y) <= 1.0) & (np.abs(x) <= (y + 1.0) / 2.0)
    else:
        raise ValueError(f"unknown shape {shape!r}: choose from {', '.join(SHAPES)}")
    return inside.reshape(size, samples, size, samples).mean(axis=(1, 3))


def look(frame: Frame) -> Seen:
    """What a picture of one coloured shape on a grey ground shows.

    Each outline is laid over the picture with the area and the centre of gravity of what is coloured; the one that
    covers it best is the shape, and its box gives size and place. Unlike corners and edges, both survive a blur.

    Args:
        frame: (H, W, 3), uint8, square.
    """
    pixels = _shrink(frame).astype(np.float64) / 255.0
    chroma = pixels.max(axis=2) - pixels.min(axis=2)
    peak = float(np.quantile(chroma, 0.99))
    if peak < _MIN_CHROMA:
        return Seen()
    colored = np.clip(chroma / peak, 0.0, 1.0)
    colored[colored < _MIN_COVERAGE] = 0.0
    body = np.where(_largest_body(colored > 0.0), colored, 0.0)
    if body.mean() < _MIN_AREA:
        return Seen()
    fits = [_fit(shape, body) for shape in SHAPES]
    overlaps = [_overlap(outline(fit.shape, len(body), fit.center, (fit.half, fit.half)), colored) for fit in fits]
    best = int(np.argmax(overlaps))
    x, y = fits[best].center
    return Seen(
        color=_nearest_color(pixels[body > 0.7]),
        shape=fits[best].shape if overlaps[best] >= _MIN_OVERLAP else None,
        size=SIZES[int(fits[best].half >= LARGE_FROM)],
        row=ROWS[int(y >= 0.5)],
        column=COLUMNS[int(x >= 0.5)],
    )


@dataclass(frozen=True)
class _Fit:
    """An outline with the area and the centre of gravity of something; lengths are parts of the picture's side."""

    shape: str
    center: tuple[float, float]
    half: float


def _fit(shape: str, body: NDArray[np.float64]) -> _Fit:
    side = len(body)
    middle = (np.arange(side) + 0.5) / side
    mass = body.sum()
    x, y = float(body.sum(axis=0) @ middle / mass), float(body.sum(axis=1) @ middle / mass)
    area = float(mass) / side**2
    half = (area / {"circle": np.pi, "square": 4.0, "triangle": 2.0}[shape]) ** 0.5
    # A triangle's centre of gravity lies a third of half its height below the middle of its box.
    return _Fit(shape, (x, y - half / 3.0 if shape == "triangle" else y), half)


def _overlap(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Intersection over union of two coverages."""
    return float(np.minimum(first, second).sum() / np.maximum(first, second).sum())


def _shrink(frame: Frame) -> Frame:
    """At most 64 pixels a side: the outlines need no more, and the time stays the same for every size."""
    if max(frame.shape[:2]) <= _MAX_SIDE and frame.shape[0] == frame.shape[1]:
        return frame
    from PIL import Image

    return np.asarray(Image.fromarray(frame).resize((_MAX_SIDE, _MAX_SIDE), Image.Resampling.BOX))


def _largest_body(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The connected part (4 neighbours) with the most pixels; all `False` for an empty mask."""
    left, best = mask.copy(), np.zeros_like(mask)
    while left.sum() > best.sum():
        part = np.zeros_like(mask)
        part.flat[int(left.argmax())] = True
        while True:
            grown = part.copy()
            grown[1:] |= part[:-1]
            grown[:-1] |= part[1:]
            grown[:, 1:] |= part[:, :-1]
            grown[:, :-1] |= part[:, 1:]
            grown &= left
            if grown.sum() == part.sum():
                break
            part = grown
        left &= ~part
        if part.sum() > best.sum():
            best = part
    return best


def _nearest_color(pixels: NDArray[np.float64]) -> str | None:
    if not len(pixels):
        return None
    mean = np.median(pixels, axis=0)
    distances = {name: float(np.linalg.norm(mean - np.asarray(color))) for name, color in COLORS.items()}
    name = min(distances, key=distances.__getitem__)
    return name if distances[name] <= _MAX_COLOR_DISTANCE else None
