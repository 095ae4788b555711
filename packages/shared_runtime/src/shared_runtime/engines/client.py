"""The client side of a group of engine workers: single asynchronous requests in, batched worker calls out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from shared_runtime.engines.split import split_by_cost
from shared_runtime.placement.groups import WorkerGroup
from shared_runtime.rollout.coalesce import Coalescer, fail_all, set_results

Request = TypeVar("Request")
Output = TypeVar("Output")


class BatchingClient(Generic[Request, Output]):
    """Coalesces concurrent requests into one `generate` call a worker, split evenly by estimated cost.

    What a request gives does not depend on how it was batched or where it went (its own seed decides the draws), so
    the split is only a matter of speed.
    """

    def __init__(
        self,
        group: WorkerGroup,
        *,
        max_batch_size: int | None = None,
        cost: Callable[[Request], float] = lambda request: 1.0,
    ) -> None:
        """Set up; starts nothing.

        Args:
            group: The engine workers.
            max_batch_size: At most this many requests in one worker call; more become several calls behind one another.
            cost: Estimated cost of a request, in any unit.
        """
        self.group = group
        self.max_batch_size = max_batch_size
        self.cost = cost
        self.loads = [0.0] * group.size
        self._coalescer: Coalescer[Request, Output] = Coalescer(self._dispatch)
        self._calls: set[asyncio.Task[None]] = set()

    async def generate(self, request: Request) -> Output:
        """Generate for one request.

        Raises:
            Exception: What the worker raised, with its own traceback.
        """
        return await self._coalescer.submit(request)

    def _dispatch(self, requests: list[Request], futures: list[asyncio.Future[Output]]) -> None:
        costs = [self.cost(request) for request in requests]
        for worker, positions in enumerate(split_by_cost(costs, self.loads)):
            step = self.max_batch_size or max(len(positions), 1)
            for start in range(0, len(positions), step):
                chosen = positions[start : start + step]
                self._call(
                    worker,
                    [requests[i] for i in chosen],
                    [futures[i] for i in chosen],
                    sum(costs[i] for i in chosen),
                )

    def _call(self, worker: int, requests: list[Request], futures: list[asyncio.Future[Output]], cost: float) -> None:
        """Start one worker call; `_finish` sets its futures."""
        try:
            (handle,) = self.group.start("generate", requests, workers=[worker])
        except Exception as error:
            # Workers in this process run inside `start`.
            fail_all(futures, error)
            return
        self.loads[worker] += cost
        task = asyncio.get_running_loop().create_task(self._finish(worker, handle, futures, cost))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _finish(self, worker: int, handle: Any, futures: list[asyncio.Future[Output]], cost: float) -> None:
        try:
            outputs = await self.group.wait_async(handle)
            if len(outputs) != len(futures):
                raise RuntimeError(f"engine {worker} answered {len(outputs)} of {len(futures)} requests")
            set_results(futures, outputs)
        except Exception as error:
            fail_all(futures, error)
        finally:
            self.loads[worker] -= cost
