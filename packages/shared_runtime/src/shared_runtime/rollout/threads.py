"""Blocking work of many coroutines, off the event loop: one hop to a thread for all that is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from shared_runtime.rollout.coalesce import Coalescer, fail_all

T = TypeVar("T")
R = TypeVar("R")


class ThreadBatcher(Generic[T, R]):
    """Calls a blocking function with batches of what coroutines submit.

    The function returns one entry an item, in order: its result, or an exception that only this item's caller gets.
    An exception that it raises goes to every caller of the batch.
    """

    def __init__(self, function: Callable[[list[T]], list[R | BaseException]], max_workers: int = 1) -> None:
        """With `max_workers=1` the function never runs twice at once, so it need not be thread-safe."""
        self._function = function
        self._pool = ThreadPoolExecutor(max_workers, thread_name_prefix="batch")
        self._coalescer: Coalescer[T, R] = Coalescer(self._dispatch)
        self._running: set[asyncio.Task[None]] = set()

    async def submit(self, item: T) -> R:
        """The result for one item."""
        return await self._coalescer.submit(item)

    def close(self) -> None:
        """End the threads once they are done."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _dispatch(self, items: list[T], futures: list[asyncio.Future[R]]) -> None:
        task = asyncio.get_running_loop().create_task(self._call(items, futures))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _call(self, items: list[T], futures: list[asyncio.Future[R]]) -> None:
        try:
            results = await asyncio.get_running_loop().run_in_executor(self._pool, self._function, items)
            if len(results) != len(items):
                raise RuntimeError(f"{len(results)} results for {len(items)} items")
        except Exception as error:
            fail_all(futures, error)
            return
        for future, result in zip(futures, results, strict=True):
            if future.done():
                continue
            if isinstance(result, BaseException):
                future.set_exception(result)
            else:
                future.set_result(result)


def call_each(function: Callable[[Any], R], items: list[Any]) -> list[R | BaseException]:
    """Call a function for each item; what it raises stands in the item's place."""
    results: list[R | BaseException] = []
    for item in items:
        try:
            results.append(function(item))
        except Exception as error:
            results.append(error)
    return results
