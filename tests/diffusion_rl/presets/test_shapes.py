"""The drawn pictures, seen by the scorer and by plain pixel counts."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffusion_rl.presets.shapes import (
    BACKGROUND,
    RADII,
    WORDS,
    all_scenes,
    captioned_pictures,
    draw,
    prompt_split,
    with_wrong_words,
    write_shapes,
)
from rewards import RewardRequest, score
from rewards.image.shapes import COLORS


def test_there_are_96_scenes_with_captions_of_known_words() -> None:
    captions = {scene.caption() for scene in all_scenes()}
    assert len(captions) == 96
    assert {word for caption in captions for word in caption.split()} <= set(WORDS)
    assert "a small red circle at the top left" in captions


@pytest.mark.parametrize("scene", all_scenes()[::5], ids=lambda scene: scene.caption())
def test_pictures_show_what_the_caption_says(scene) -> None:
    """Areas and places from pixel counts, independent of how it was drawn."""
    picture = draw(scene, random.Random(3))
    assert picture.shape == (3, 64, 64)
    assert picture.dtype == np.float32
    np.testing.assert_allclose(picture[:, 0, 0], BACKGROUND, atol=1e-6)
    paint = np.asarray(COLORS[scene.color])
    channel = int(np.abs(paint - BACKGROUND).argmax())
    covered = (picture[channel] - BACKGROUND[channel]) / (paint[channel] - BACKGROUND[channel])
    area = covered.mean()
    box = {"circle": math.pi, "square": 4.0, "triangle": 2.0}[scene.shape]
    low, high = RADII[scene.size]
    assert box * low**2 * 0.97 < area < box * high**2 * 1.03
    ys, xs = np.nonzero(covered > 0.5)
    assert ((xs.min() + xs.max()) / 2 < 31.5) == (scene.column == "left")
    assert ((ys.min() + ys.max()) / 2 < 31.5) == (scene.row == "top")


def test_the_scorer_agrees_on_every_scene() -> None:
    rng = random.Random(0)
    requests = [
        RewardRequest(prompt=scene.caption(), image=draw(scene, rng), sample_id=scene.caption())
        for scene in all_scenes()
        for _ in range(3)
    ]
    missed = [r.sample_id for r, s in zip(requests, score(requests, "shapes"), strict=True) if s["score"] != 1.0]
    assert missed == []


def test_wrong_words() -> None:
    rng, scene = random.Random(0), all_scenes()[0]
    assert with_wrong_words(scene, 0.0, rng) == scene
    everything = with_wrong_words(scene, 1.0, rng)
    assert all(getattr(everything, name) != getattr(scene, name) for name in vars(scene))
    wrong = [with_wrong_words(scene, 0.3, rng).color != scene.color for _ in range(2000)]
    assert np.mean(wrong) == pytest.approx(0.3, abs=0.04)


def test_pictures_come_from_their_seed_and_scenes_equally_often() -> None:
    first, again, other = ([*captioned_pictures(192, seed)] for seed in (1, 1, 2))
    assert [caption for caption, _ in first] == [caption for caption, _ in again]
    np.testing.assert_array_equal(first[7][1], again[7][1])
    assert [caption for caption, _ in first] != [caption for caption, _ in other]
    assert set(Counter(caption for caption, _ in first).values()) == {2}


def test_prompts_are_split() -> None:
    train, held_out = prompt_split(seed=0, num_held_out=16)
    assert (len(train), len(held_out)) == (80, 16)
    assert not set(train) & set(held_out)
    with pytest.raises(ValueError, match="num_held_out"):
        prompt_split(num_held_out=96)


def test_files(tmp_path: Path) -> None:
    files = write_shapes(tmp_path, num_pictures=5, wrong_words=0.0)
    rows = [json.loads(line) for line in files.captioned.read_text().splitlines()]
    assert len(rows) == 5
    for row, (caption, picture) in zip(rows, captioned_pictures(5), strict=True):
        assert row["input"] == caption
        stored = np.asarray(Image.open(files.captioned.parent / row["image"]))
        assert np.abs(stored / 255.0 - picture.transpose(1, 2, 0)).max() <= 0.5 / 255 + 1e-6
    assert len(files.train.read_text().splitlines()) == 80
    assert json.loads(files.held_out.read_text().splitlines()[0])["input"] in prompt_split()[1]
