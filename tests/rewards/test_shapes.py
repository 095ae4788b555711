"""The `shapes` scorer on pictures that PIL draws."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from rewards import LabelError, RewardRequest, score
from rewards.image.shapes import Seen, asked_properties, look, outline

GREY = (210, 210, 210)
PAINT = {"red": (217, 38, 38), "green": (38, 166, 64), "blue": (38, 76, 217), "yellow": (242, 204, 26)}


def picture(shape: str, color: tuple[int, int, int], center: tuple[int, int], half: int, side: int = 64) -> Image.Image:
    image = Image.new("RGB", (side, side), GREY)
    pen, (x, y) = ImageDraw.Draw(image), center
    box = (x - half, y - half, x + half, y + half)
    if shape == "circle":
        pen.ellipse(box, fill=color)
    elif shape == "square":
        pen.rectangle(box, fill=color)
    else:
        pen.polygon([(x, y - half), (x - half, y + half), (x + half, y + half)], fill=color)
    return image


@pytest.mark.parametrize("color", PAINT)
@pytest.mark.parametrize("shape", ["circle", "square", "triangle"])
@pytest.mark.parametrize(("size", "half"), [("small", 8), ("large", 14)])
def test_it_sees_what_was_drawn(color: str, shape: str, size: str, half: int) -> None:
    for row, y in (("top", 20), ("bottom", 44)):
        for column, x in (("left", 19), ("right", 45)):
            seen = look(np.asarray(picture(shape, PAINT[color], (x, y), half)))
            assert seen == Seen(color, shape, size, row, column)


def test_it_sees_through_blur_and_noise_and_at_any_resolution() -> None:
    rng = np.random.default_rng(0)
    for shape in ("circle", "square", "triangle"):
        blurred = picture(shape, PAINT["blue"], (20, 44), 14).filter(ImageFilter.GaussianBlur(1.0))
        noisy = np.clip(np.asarray(blurred) + rng.normal(0, 8, (64, 64, 3)), 0, 255).astype(np.uint8)
        big = np.asarray(picture(shape, PAINT["blue"], (160, 352), 112, side=512))
        assert look(noisy) == look(big) == Seen("blue", shape, "large", "bottom", "left")


def test_a_request_scores_the_part_that_is_right() -> None:
    image = picture("circle", PAINT["red"], (20, 20), 8)
    prompts = {
        "a small red circle at the top left": 1.0,
        "a large red circle at the top left": 0.8,
        "a large blue square at the bottom right": 0.0,
        "a red square": 0.5,
        "something GREEN": 0.0,
    }
    requests = [RewardRequest(prompt=prompt, image=image) for prompt in prompts]
    scores = score(requests, "shapes")
    assert [s["score"] for s in scores] == pytest.approx(list(prompts.values()))
    assert scores[1] == {"score": 0.8, "color": 1.0, "shape": 1.0, "size": 0.0, "row": 1.0, "column": 1.0}
    assert set(scores[3]) == {"score", "color", "shape"}


def test_float_images_channels_first_score_the_same() -> None:
    image = picture("triangle", PAINT["yellow"], (45, 20), 14)
    array = np.asarray(image).transpose(2, 0, 1).astype(np.float32) / 255.0
    prompt = "a large yellow triangle at the top right"
    assert [s["score"] for s in score([RewardRequest(prompt=prompt, image=array)], "shapes")] == [1.0]


def test_nothing_noise_and_clutter_are_no_shape() -> None:
    rng = np.random.default_rng(0)
    assert look(np.full((64, 64, 3), 210, np.uint8)) == Seen()
    assert look(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).shape is None
    clutter = picture("circle", PAINT["red"], (20, 20), 8)
    ImageDraw.Draw(clutter).rectangle((40, 40, 56, 56), fill=PAINT["red"])
    assert look(np.asarray(clutter)).shape is None
    purple = look(np.asarray(picture("circle", (128, 0, 255), (20, 20), 8)))
    assert (purple.shape, purple.color) == ("circle", None)


def test_prompts_that_it_cannot_judge_name_their_sample() -> None:
    image = picture("circle", PAINT["red"], (20, 20), 8)
    for prompt, message in [
        ("a photo of a cat", "names nothing that the shapes reward can see: red"),
        ("a red or blue circle", "asks for blue and red at once"),
        ("", "has no prompt"),
    ]:
        with pytest.raises(LabelError, match=f"sample 17.*{message}"):
            score([RewardRequest(prompt=prompt, image=image, sample_id=17)], "shapes")
    with pytest.raises(LabelError, match="sample 17"):
        score([RewardRequest(prompt="a red circle", image=None, sample_id=17)], "shapes")


def test_properties_are_whole_words() -> None:
    assert asked_properties("A Red circle, at the top-left.") == {
        "color": "red",
        "shape": "circle",
        "row": "top",
        "column": "left",
    }
    with pytest.raises(ValueError, match="names nothing"):
        asked_properties("a reddish stop sign")


@pytest.mark.parametrize(("shape", "area"), [("circle", np.pi / 4), ("square", 1.0), ("triangle", 0.5)])
def test_outlines_cover_their_area(shape: str, area: float) -> None:
    covered = outline(shape, 64, (0.5, 0.5), (0.25, 0.25))
    assert covered.mean() == pytest.approx(area * 0.25, rel=0.01)
    with pytest.raises(ValueError, match="unknown shape"):
        outline("star", 64, (0.5, 0.5), (0.25, 0.25))
