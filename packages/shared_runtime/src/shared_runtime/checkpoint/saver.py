"""When a checkpoint is written, and what goes into it: every rank's shards, and the driver's own state beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared_runtime.checkpoint.sentinel import SaveSentinel
from shared_runtime.checkpoint.store import CheckpointError, CheckpointStore
from shared_runtime.domain import Domain
from shared_runtime.placement.groups import WorkerGroup


class Saver:
    """Saves every `interval` rollouts, at the end, and on demand; resumes from the latest complete checkpoint.

    Args:
        store: Where this run's checkpoints are.
        interval: Rollouts between checkpoints; `None` saves only at the end.
        sentinel: File that asks for a checkpoint now.
        load: Another run's checkpoint directory, read only when this run has no checkpoint of its own.
        update_weights_interval: Rollouts between weight updates. A checkpoint on demand waits for the next one: a run
            that goes on from a checkpoint publishes first, and between two updates it would then lag less than it did.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        interval: int | None,
        sentinel: Path | None = None,
        load: Path | None = None,
        update_weights_interval: int = 1,
    ) -> None:
        self.store, self.interval, self.update_weights_interval = store, interval, update_weights_interval
        self.sentinel = SaveSentinel(sentinel) if sentinel is not None else None
        self.load = load

    def due(self, rollouts: int, *, last: bool) -> bool:
        """Whether a checkpoint is to be written after this many rollouts."""
        updated = rollouts % self.update_weights_interval == 0
        asked = self.sentinel is not None and self.sentinel.requested()
        return last or (asked and updated) or (self.interval is not None and rollouts % self.interval == 0)

    def save(self, rollouts: int, trainers: WorkerGroup, domain: Domain, state: dict[str, Any]) -> Path:
        """Write a checkpoint with the loop's own `state`; a request for one is answered once it is complete."""
        with self.store.writing(rollouts) as staging:
            trainers.call("save", staging)
            domain.save(staging)
            self.store.write_driver_state(staging, state)
        if self.sentinel is not None:
            self.sentinel.acknowledge()
        path = self.store.latest()
        assert path is not None
        return path

    def resume(self, trainers: WorkerGroup | None, domain: Domain) -> dict[str, Any] | None:
        """Load the latest checkpoint into trainers and domain; return the loop's state, `None` without a checkpoint."""
        latest = self.store.latest()
        if latest is None and self.load is not None:
            latest = CheckpointStore(self.load, keep_last=None).latest()
            if latest is None:
                raise CheckpointError(f"--load {self.load} holds no checkpoint")
        if latest is None:
            return None
        if trainers is not None:
            trainers.call("load", latest)
        domain.load(latest)
        return self.store.read_driver_state(latest)
