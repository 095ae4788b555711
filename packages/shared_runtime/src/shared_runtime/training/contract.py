"""What a training backend has to do, and nothing more.

A backend is one class. Each trainer rank holds one instance, in a Ray actor or in the driver's own process; every
method below is called on all ranks together, since any of them may contain collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shared_runtime.training.plan import StepPlan
from shared_runtime.weight_sync.bucket import Bucket, TensorMeta


@dataclass(frozen=True)
class TrainerInfo:
    """What the driver needs to know of one rank after `init`."""

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int
    num_parameters: int


class Trainer(Protocol):
    """A training backend, seen from above."""

    def init(self) -> TrainerInfo:
        """Build model, optimizer and parallel layout."""

    def train(self, rollout_id: int, steps: list[StepPlan]) -> dict[str, float]:
        """Take the optimizer steps of one rollout on this rank's share; return metrics (same keys on every rank)."""

    def weight_metadata(self) -> list[TensorMeta]:
        """Names, shapes and dtypes of the published weights, Hugging Face or diffusers names, tied ones once."""

    def export_bucket(self, names: tuple[str, ...], index: int) -> Bucket | None:
        """Gather the named tensors; rank 0 returns them as one bucket, other ranks `None`."""

    def weight_checksums(self) -> dict[str, str] | None:
        """SHA-256 of every published tensor, in its published dtype; rank 0 returns it, other ranks `None`."""

    def save(self, directory: Path) -> None:
        """Write this rank's part of a sharded checkpoint into `directory`."""

    def load(self, directory: Path) -> None:
        """Read a checkpoint that `save` wrote, at any world size."""

    def save_hf(self, directory: Path) -> None:
        """Write the weights as an ordinary Hugging Face directory (rank 0 writes)."""

    def sleep(self) -> None:
        """Move model and optimizer off the device."""

    def wake_up(self) -> None:
        """Move them back."""

    def shutdown(self) -> None:
        """Leave the process group."""


# A training row is whatever the domain's trainer reads; the plan only needs its length.
Row = dict[str, Any]
