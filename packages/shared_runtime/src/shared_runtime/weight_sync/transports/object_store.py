"""Buckets through the workers' common memory: Ray's object store, or this process itself."""

from __future__ import annotations

from collections import deque
from typing import Any

from shared_runtime.placement.groups import WorkerGroup
from shared_runtime.weight_sync.transports.base import UpdatePlan


class ObjectStoreTransport:
    """Hands the handle of each exported bucket on to the engines.

    With Ray a handle is an object reference: rank 0 puts the bucket into shared memory once, and every engine on the
    node maps the same pages. The driver sees references only. Export of one bucket overlaps with the loading of the one
    before.

    Args:
        max_in_flight: Buckets that exist at a time.
    """

    def __init__(self, max_in_flight: int = 2) -> None:
        if max_in_flight < 1:
            raise ValueError(f"at least one bucket must be in flight, got {max_in_flight}")
        self.max_in_flight = max_in_flight

    def transfer(self, trainers: WorkerGroup, engines: WorkerGroup, plan: UpdatePlan) -> list[int]:
        """Move every bucket; return, for each engine, how many tensors it says it applied."""
        applied = [0] * engines.size
        in_flight: deque[tuple[list[Any], list[Any]]] = deque()

        def finish_oldest() -> None:
            exported, loading = in_flight.popleft()
            # The engines wait for rank 0's export; fetching it here would bring its bytes to the driver.
            trainers.wait(exported[1:])
            for engine, count in enumerate(engines.wait(loading)):
                applied[engine] += count

        for index, names in enumerate(plan.buckets):
            if len(in_flight) == self.max_in_flight:
                finish_oldest()
            exported = trainers.start("export_bucket", names, index)
            in_flight.append((exported, engines.start("apply_bucket", exported[0])))
            del exported
        while in_flight:
            finish_oldest()
        return applied
