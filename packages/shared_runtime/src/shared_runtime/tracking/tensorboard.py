"""TensorBoard event files. Imported only when a run asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shared_runtime.tracking.sink import LoggedImage, Metrics, Sink

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoardSink(Sink):
    """Writes scalars and pictures as TensorBoard events.

    After a resume TensorBoard is told to discard what the killed run had written later than the checkpoint
    (`purge_step`), so curves have no double points.

    Args:
        directory: `--tensorboard-dir`.

    Raises:
        ImportError: If TensorBoard is not installed; names the extra.
    """

    name = "tensorboard"

    def __init__(self, directory: Path) -> None:
        self._writer_class = _import_writer()
        self._directory = directory
        self._purge_step: int | None = None
        self._writer: SummaryWriter | None = None

    def log(self, step: int, metrics: Metrics) -> None:
        """Write the finite metrics of a step."""
        writer = self._open()
        for key, value in metrics.items():
            if value is not None:
                writer.add_scalar(key, value, global_step=step)
        writer.flush()

    def log_images(self, step: int, key: str, images: Sequence[LoggedImage]) -> None:
        """Write pictures, one tag each."""
        writer = self._open()
        for number, image in enumerate(images):
            writer.add_image(f"{key}/{number}", image.pixels, global_step=step, dataformats="HWC")

    def truncate_after(self, step: int) -> None:
        """Discard later events of earlier files."""
        self.close()
        self._purge_step = step + 1

    def close(self) -> None:
        """Close the event file."""
        if self._writer:
            self._writer.close()
            self._writer = None

    def _open(self) -> SummaryWriter:
        if self._writer is None:
            self._writer = self._writer_class(log_dir=str(self._directory), purge_step=self._purge_step)
        return self._writer


def _import_writer() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "--tensorboard-dir needs the package tensorboard: install tandem-shared-runtime[tensorboard], "
            "or leave the flag out"
        ) from error
    return SummaryWriter
