"""Captioned pictures that the project draws: one coloured shape on light grey, at a random place and size.

The words, colours and outlines are those of the `shapes` reward. Captions can be drawn with wrong words in them, as
found captions have; a model pretrained on those follows its prompts in part, and reinforcement has something to mend.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from diffusion_rl.media import to_uint8
from rewards.image.shapes import COLORS, COLUMNS, PROPERTIES, ROWS, SHAPES, SIZES, outline

BACKGROUND = (0.82, 0.82, 0.82)
IMAGE_SIZE = 64

RADII = {"small": (0.14, 0.17), "large": (0.22, 0.26)}
"""Half of a shape's box, as a part of the picture's side."""

CENTERS = (0.29, 0.37)
"""How far a shape's centre lies from the two edges that its place names, likewise; the largest still fits."""

FILLER_WORDS = ("a", "at", "the", "picture", "of", "in", "and")
WORDS: tuple[str, ...] = (*FILLER_WORDS, *(word for values in PROPERTIES.values() for word in values))
"""Every word that a caption may have."""


@dataclass(frozen=True)
class Scene:
    """What a picture shows, in words and exactly.

    Attributes:
        color: One of `COLORS`.
        shape: One of `SHAPES`.
        size: One of `SIZES`.
        row: One of `ROWS`.
        column: One of `COLUMNS`.
    """

    color: str
    shape: str
    size: str
    row: str
    column: str

    def caption(self) -> str:
        """For example "a small red circle at the top left"."""
        return f"a {self.size} {self.color} {self.shape} at the {self.row} {self.column}"


@dataclass(frozen=True)
class ShapesFiles:
    """Where the data lies.

    Attributes:
        captioned: JSONL rows `{"input": caption, "image": path relative to the file}`, for supervised training.
        train: JSONL rows `{"input": prompt}`, for reinforcement.
        held_out: Likewise, prompts that `train` lacks.
    """

    captioned: Path
    train: Path
    held_out: Path


def all_scenes() -> list[Scene]:
    """All 96 of them."""
    return [Scene(*words) for words in itertools.product(COLORS, SHAPES, SIZES, ROWS, COLUMNS)]


def draw(scene: Scene, rng: random.Random, size: int = IMAGE_SIZE) -> np.ndarray:
    """A picture of the scene; place and size vary within what the words allow.

    Returns:
        (3, size, size), float32 in [0, 1].
    """
    half = rng.uniform(*RADII[scene.size])
    x, y = (rng.uniform(*CENTERS) for _ in range(2))
    center = (x if scene.column == "left" else 1.0 - x, y if scene.row == "top" else 1.0 - y)
    covered = outline(scene.shape, size, center, (half, half))
    ground, paint = (np.asarray(color)[:, None, None] for color in (BACKGROUND, COLORS[scene.color]))
    return (ground * (1.0 - covered) + paint * covered).astype(np.float32)


def with_wrong_words(scene: Scene, probability: float, rng: random.Random) -> Scene:
    """The scene with each of its words replaced, with that probability, by another word of its kind."""
    words = {}
    for name, values in PROPERTIES.items():
        word = getattr(scene, name)
        words[name] = rng.choice([v for v in values if v != word]) if rng.random() < probability else word
    return Scene(**words)


def captioned_pictures(
    count: int, seed: int = 0, wrong_words: float = 0.0, size: int = IMAGE_SIZE
) -> Iterator[tuple[str, np.ndarray]]:
    """Captions and pictures, the same for the same seed; every scene comes about equally often.

    Args:
        count: How many.
        seed: Of scenes, places and wrong words.
        wrong_words: Probability of each word in the caption to be wrong.
        size: Pixels a side.
    """
    rng = random.Random(seed)
    scenes = all_scenes()
    order: list[Scene] = []
    for _ in range(count):
        if not order:
            order = rng.sample(scenes, len(scenes))
        scene = order.pop()
        yield with_wrong_words(scene, wrong_words, rng).caption(), draw(scene, rng, size)


def prompt_split(seed: int = 0, num_held_out: int = 16) -> tuple[list[str], list[str]]:
    """All prompts, shuffled and split: (train, held out).

    Raises:
        ValueError: If nothing would be left to train on.
    """
    prompts = [scene.caption() for scene in all_scenes()]
    if not 0 <= num_held_out < len(prompts):
        raise ValueError(f"num_held_out must lie in [0, {len(prompts) - 1}], not {num_held_out}")
    random.Random(seed).shuffle(prompts)
    return prompts[num_held_out:], prompts[:num_held_out]


def write_shapes(
    directory: Path, *, num_pictures: int = 4096, seed: int = 0, wrong_words: float = 0.0, num_held_out: int = 16
) -> ShapesFiles:
    """Write pictures (PNG), `captioned.jsonl`, `train.jsonl` and `held_out.jsonl`."""
    from PIL import Image

    (directory / "pictures").mkdir(parents=True, exist_ok=True)
    files = ShapesFiles(*(directory / f"{name}.jsonl" for name in ("captioned", "train", "held_out")))
    rows = []
    for index, (caption, picture) in enumerate(captioned_pictures(num_pictures, seed, wrong_words)):
        name = f"pictures/{index:05d}.png"
        Image.fromarray(to_uint8(picture)).save(directory / name)
        rows.append({"input": caption, "image": name})
    _write_rows(files.captioned, rows)
    write_prompts(directory, seed=seed, num_held_out=num_held_out)
    return files


def write_prompts(directory: Path, *, seed: int = 0, num_held_out: int = 16) -> None:
    """Write `train.jsonl` and `held_out.jsonl` alone."""
    for name, prompts in zip(("train", "held_out"), prompt_split(seed, num_held_out), strict=True):
        _write_rows(directory / f"{name}.jsonl", [{"input": prompt} for prompt in prompts])


def _write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
