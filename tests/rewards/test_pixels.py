"""Images of every layout become the same frames, rounded once."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from rewards.image.pixels import sample_evenly, to_frames

REFERENCE = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


def only(image: object) -> np.ndarray:
    frames = to_frames(image)
    assert len(frames) == 1
    assert frames[0].dtype == np.uint8
    return frames[0]


def test_every_layout_is_one_image() -> None:
    import torch

    floats = REFERENCE.astype(np.float32) / 255
    chw = np.ascontiguousarray(floats.transpose(2, 0, 1))
    alpha = np.concatenate([REFERENCE, np.full((5, 7, 1), 9, np.uint8)], axis=2)
    tensor = torch.from_numpy(chw)
    same = [REFERENCE, floats, chw, alpha, alpha.transpose(2, 0, 1), Image.fromarray(REFERENCE), Image.fromarray(alpha)]
    same += [tensor, tensor.double(), tensor[None], floats[None], [REFERENCE]]
    for image in same:
        np.testing.assert_array_equal(only(image), REFERENCE)


def test_values_are_rounded_and_not_truncated() -> None:
    values = np.array([0.0, 0.4999 / 255, 0.5001 / 255, 254.6 / 255, 1.0, 1.5, -1.0, np.nan, np.inf])
    image = np.repeat(values.reshape(1, -1, 1), 3, axis=2)
    assert only(image)[0, :, 0].tolist() == [0, 0, 1, 255, 255, 255, 0, 0, 255]


def test_grey_small_and_ambiguous_images() -> None:
    grey = REFERENCE[:, :, 0]
    for image in (grey, grey[:, :, None], grey[None], Image.fromarray(grey)):
        np.testing.assert_array_equal(only(image), np.repeat(grey[:, :, None], 3, axis=2))
    assert only(np.zeros((3, 1, 1))).shape == (1, 1, 3)
    assert only(np.zeros((1, 1, 3))).shape == (1, 1, 3)
    assert only(np.zeros((4, 4, 3))).shape == (4, 4, 3)
    assert only(np.zeros((3, 4, 4))).shape == (4, 4, 3)
    assert only(np.zeros((3, 1, 64))).shape == (1, 64, 3)


def test_videos_are_frames_of_which_an_even_choice_is_taken() -> None:
    video = np.arange(10, dtype=np.uint8).reshape(10, 1, 1, 1) * np.ones((1, 2, 2, 3), np.uint8)
    assert [int(frame[0, 0, 0]) for frame in to_frames(video)] == list(range(10))
    assert [int(frame[0, 0, 0]) for frame in to_frames(video, 4)] == [0, 3, 6, 9]
    assert [int(frame[0, 0, 0]) for frame in to_frames(video.transpose(0, 3, 1, 2), 2)] == [0, 9]
    assert sample_evenly(list(range(9)), 1) == [4]
    assert sample_evenly([1, 2], 5) == [1, 2]
    with pytest.raises(ValueError, match="at least 1"):
        sample_evenly([1], 0)


@pytest.mark.parametrize(
    "image", [None, [], np.zeros((0, 4, 3)), np.zeros((5, 7, 6)), np.zeros((5, 7, 3), np.int64), 7]
)
def test_what_is_no_image_is_an_error(image: object) -> None:
    with pytest.raises(ValueError, match=r"image|frames"):
        to_frames(image)
