"""Run coroutines from synchronous code, also where an event loop already runs (notebooks)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class AsyncRunner:
    """One event loop for a whole run; `run` blocks until the coroutine is done.

    In a thread that already runs a loop, as a notebook's does, the coroutines run on a thread of their own.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout") if _loop_is_running() else None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result; its exceptions pass through."""
        if self._thread is None:
            return self._runner.run(coroutine)
        return self._thread.submit(self._runner.run, coroutine).result()

    def close(self) -> None:
        """Cancel what is left and close the loop."""
        if self._thread is None:
            self._runner.close()
        else:
            self._thread.submit(self._runner.close).result()
            self._thread.shutdown()


def _loop_is_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return threading.current_thread() is threading.main_thread()
