"""Runs rollout coroutines from synchronous code: one event loop for the whole run, in scripts and notebooks alike."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, TypeVar

R = TypeVar("R")


class EventLoop:
    """An event loop that lives as long as the run, so that clients and connections may stay open between rollouts.

    Where this thread already runs a loop (a notebook), it lives in a thread of its own.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._thread: ThreadPoolExecutor | None = None

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine to its end and return its result."""
        results: list[R] = []

        async def keep_result() -> None:
            # The result stays out of the task: restoring the SIGINT handler formats the task with it, and formatting a
            # whole batch of samples takes longer than the rest of the scheduling.
            results.append(await coroutine)

        if self._thread is None and _loop_is_running():
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout")
        if self._thread is None:
            self._runner.run(keep_result())
        else:
            self._thread.submit(self._runner.run, keep_result()).result()
        return results[0]

    def close(self) -> None:
        """Close the loop."""
        if self._thread is not None:
            self._thread.submit(self._runner.close).result()
            self._thread.shutdown()
        else:
            self._runner.close()

    def __enter__(self) -> EventLoop:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
