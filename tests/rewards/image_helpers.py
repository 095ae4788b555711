"""Images for the tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont


def text_image(text: str, size: tuple[int, int] = (256, 96)) -> NDArray[np.uint8]:
    """Black text on white, (H, W, 3), uint8."""
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).text((12, 20), text, fill="black", font=ImageFont.load_default(size=44))
    return np.asarray(image)


def random_image(seed: int, size: int = 32) -> NDArray[np.uint8]:
    """Noise, (size, size, 3), uint8."""
    return np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
