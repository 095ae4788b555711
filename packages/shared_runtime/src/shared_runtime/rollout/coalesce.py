"""Many concurrent small calls, one batched call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Coalescer(Generic[T, R]):
    """Collects the items that coroutines submit and hands them over together.

    A batch is handed over as soon as a whole tick of the event loop has passed without a new item: nothing waits on a
    clock, and tasks that need a few more ticks to get to their submission still join.
    """

    def __init__(self, dispatch: Callable[[list[T], list[asyncio.Future[R]]], None]) -> None:
        """`dispatch(items, futures)` gets a batch in the order of submission and must see that every future is set."""
        self._dispatch = dispatch
        self._items: list[T] = []
        self._futures: list[asyncio.Future[R]] = []

    def submit(self, item: T) -> asyncio.Future[R]:
        """Add an item; the future is its result. Call it from a running event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._items.append(item)
        self._futures.append(future)
        if len(self._items) == 1:
            loop.call_soon(self._flush_when_quiet, loop, 1)
        return future

    def _flush_when_quiet(self, loop: asyncio.AbstractEventLoop, seen: int) -> None:
        if len(self._items) > seen:
            loop.call_soon(self._flush_when_quiet, loop, len(self._items))
            return
        # Those whose caller was cancelled in the meantime need no work.
        alive = [i for i, future in enumerate(self._futures) if not future.done()]
        items, futures = [self._items[i] for i in alive], [self._futures[i] for i in alive]
        self._items, self._futures = [], []
        if items:
            try:
                self._dispatch(items, futures)
            except Exception as error:
                fail_all(futures, error)


def set_results(futures: list[asyncio.Future[R]], results: list[R]) -> None:
    """Set one result each; futures whose caller is gone are left alone.

    Raises:
        ValueError: If the numbers differ.
    """
    for future, result in zip(futures, results, strict=True):
        if not future.done():
            future.set_result(result)


def fail_all(futures: list[asyncio.Future[R]], error: BaseException) -> None:
    """Give every waiting caller the same error."""
    for future in futures:
        if not future.done():
            future.set_exception(error)
