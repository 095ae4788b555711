"""Grids of pictures in the run's directory."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from shared_runtime.tracking.sink import LoggedImage, Sink

_COLUMNS = 8


class GridSink(Sink):
    """Draws the pictures of a step into one file: `<directory>/<last part of the key>_<step>.png`.

    Args:
        directory: Usually `media` of the run's directory; made with the first picture.
    """

    name = "grids"

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def log_images(self, step: int, key: str, images: Sequence[LoggedImage]) -> None:
        """Draw a grid; a step that is logged again replaces its own."""
        if images:
            self._directory.mkdir(parents=True, exist_ok=True)
            draw_grid(self._directory / f"{key.rpartition('/')[2]}_{step:06d}.png", images)


def draw_grid(path: Path, images: Sequence[LoggedImage]) -> None:
    """Write pictures, up to eight a row, each below its caption, as one PNG."""
    from matplotlib.figure import Figure

    columns = min(len(images), _COLUMNS)
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(1.7 * columns, 2.3 * rows), layout="constrained")
    for axis, image in zip(figure.subplots(rows, columns, squeeze=False).flat, images, strict=False):
        axis.imshow(image.pixels)
        axis.set_title(textwrap.fill(image.caption, 22, max_lines=4), fontsize=7)
    for axis in figure.axes:
        axis.set_axis_off()
    figure.savefig(path, dpi=130)
