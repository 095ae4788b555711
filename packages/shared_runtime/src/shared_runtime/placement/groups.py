"""A group of workers that are driven together: in Ray actors or in this process, behind one interface.

`start` returns handles without waiting. A handle may be passed as an argument to another group's `start`: with Ray
it is an object reference, so the value goes from worker to worker through shared memory and never through the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class WorkerGroup(Protocol):
    """Several workers of one class."""

    size: int

    def start(self, method: str, *args: Any, workers: Sequence[int] | None = None) -> list[Any]:
        """Call `method(*args)` on every worker (or on those named); return one handle each, without waiting."""

    def start_each(self, method: str, per_worker: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `method` on each worker with its own arguments; return one handle each, without waiting."""

    def wait(self, handles: Sequence[Any]) -> list[Any]:
        """Wait for handles; the first failure is raised with the worker's own traceback, within seconds."""

    async def wait_async(self, handle: Any) -> Any:
        """Wait for one handle without blocking the event loop."""

    def call(self, method: str, *args: Any) -> list[Any]:
        """`wait(start(method, *args))`."""

    def call_each(self, method: str, per_worker: Sequence[tuple[Any, ...]]) -> list[Any]:
        """`wait(start_each(method, per_worker))`."""

    def shutdown(self) -> None:
        """Stop the workers; no process stays behind."""


class InProcessGroup:
    """One worker in this process (notebooks, tests, `--in-process`)."""

    size = 1

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def start(self, method: str, *args: Any, workers: Sequence[int] | None = None) -> list[Any]:
        return [getattr(self.worker, method)(*args)] if workers is None or 0 in workers else []

    def start_each(self, method: str, per_worker: Sequence[tuple[Any, ...]]) -> list[Any]:
        if len(per_worker) != 1:
            raise ValueError(f"an in-process group has one worker, got arguments for {len(per_worker)}")
        return self.start(method, *per_worker[0])

    def wait(self, handles: Sequence[Any]) -> list[Any]:
        return list(handles)

    async def wait_async(self, handle: Any) -> Any:
        return handle

    def call(self, method: str, *args: Any) -> list[Any]:
        return self.wait(self.start(method, *args))

    def call_each(self, method: str, per_worker: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self.wait(self.start_each(method, per_worker))

    def shutdown(self) -> None:
        close = getattr(self.worker, "shutdown", None)
        if close is not None:
            close()
