"""What a sink is: one place that metrics go to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import numpy as np

# A metric that was NaN or infinite is `None`: JSON has no other word for it.
Metrics = Mapping[str, float | None]
Row = Mapping[str, Any]


class TrackingError(RuntimeError):
    """The run's own record can't be written or read."""


@dataclass(frozen=True)
class LoggedImage:
    """One picture of a step.

    Attributes:
        pixels: uint8, (height, width, 3), RGB.
        caption: Shown beside it, usually the prompt and the reward.
    """

    pixels: np.ndarray
    caption: str = ""


class Sink:
    """Base of all sinks; a sink overrides what it has a place for.

    A `required` sink is the run's record: its failure is an error that stops the run. Any other is a convenience:
    its first failure warns, later ones are counted, and the run goes on.
    """

    name: ClassVar[str]
    required: ClassVar[bool] = False

    def log(self, step: int, metrics: Metrics) -> None:
        """Take the metrics of a step."""

    def log_samples(self, step: int, rows: Sequence[Row]) -> None:
        """Take what was sampled in a step: JSON-like rows (prompt, response, label, reward)."""

    def log_images(self, step: int, key: str, images: Sequence[LoggedImage]) -> None:
        """Take the pictures of a step."""

    def phase(self, name: str | None) -> None:
        """Hear what the run is doing now (`rollout`, `actor_train`, …; `None` between phases)."""

    def truncate_after(self, step: int) -> None:
        """Forget every row later than `step`: the run goes on behind a checkpoint and will log them again."""

    def close(self) -> None:
        """Write what is pending and let go."""
