"""What a transport does: bring the buckets of one open update from the trainers to the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from shared_runtime.placement.groups import WorkerGroup
from shared_runtime.weight_sync.bucket import TensorMeta


@dataclass(frozen=True)
class UpdatePlan:
    """One update.

    Attributes:
        version: Version of the weights, as the engines have been told it.
        tensors: Every tensor of the update, as the engines have accepted it.
        buckets: Names of each bucket, in order; every tensor is in exactly one.
    """

    version: int
    tensors: tuple[TensorMeta, ...]
    buckets: tuple[tuple[str, ...], ...]


class WeightTransport(Protocol):
    """A way from trainers to engines (shared memory, a process group, a disk).

    It runs inside an open session: the engines are paused and have accepted names, shapes and dtypes. It raises on any
    failure and need not clean up the engines, since the session aborts the update on all of them.
    """

    def transfer(self, trainers: WorkerGroup, engines: WorkerGroup, plan: UpdatePlan) -> list[int]:
        """Move every bucket; return, for each engine, how many tensors it says it applied."""
