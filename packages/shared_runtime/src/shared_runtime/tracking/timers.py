"""Wall-clock timers of a step: `perf/<name>_time`, `perf/step_time`, `perf/overhead`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

# What a step is for. The rest of it is overhead.
WORK = frozenset({"rollout", "reward", "teacher", "actor_train", "update_weights", "eval"})


class Timers:
    """Named timers of one step.

    `with timers("rollout"):` counts the time during which at least one block of that name is open, so blocks that
    overlap (asyncio tasks, threads) or nest count once, and a name's time never exceeds the step's. A block that is
    open while the step is popped is split between both steps.

    Args:
        work: Names that are not overhead.
        on_change: Called with a name when its first block opens, with the enclosing name or `None` when it closes.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        work: Collection[str] = WORK,
        on_change: Callable[[str | None], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._work = frozenset(work)
        self._on_change = on_change
        self._clock = clock
        self._lock = threading.RLock()
        self._open: dict[str, int] = {}  # name -> open blocks, in the order of opening
        self.start_step()

    def start_step(self) -> None:
        """Begin a step now and forget what was counted since the last one."""
        with self._lock:
            self._seconds: dict[str, float] = {}
            self._busy = 0.0
            self._step_start = self._mark = self._clock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the time of the block under `name`."""
        with self._lock:
            self._advance()
            self._open[name] = self._open.get(name, 0) + 1
            opened = self._open[name] == 1
        if opened and self._on_change:
            self._on_change(name)
        try:
            yield
        finally:
            with self._lock:
                self._advance()
                self._seconds.setdefault(name, 0.0)
                self._open[name] -= 1
                closed = self._open[name] == 0
                if closed:
                    del self._open[name]
                enclosing = next(reversed(self._open), None)
            if closed and self._on_change:
                self._on_change(enclosing)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds measured elsewhere, inside a block that is counted already (they are not work a second time)."""
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def pop(self) -> dict[str, float]:
        """End the step and begin the next.

        Returns:
            `perf/<name>_time` in seconds for every name of the step, `perf/step_time`, and `perf/overhead`: the share
            of the step during which no block of the `work` names was open.
        """
        with self._lock:
            self._advance()
            step = self._mark - self._step_start
            metrics = {f"perf/{name}_time": seconds for name, seconds in self._seconds.items()}
            metrics["perf/step_time"] = step
            metrics["perf/overhead"] = max(0.0, 1.0 - self._busy / step) if step > 0 else 0.0
            self._seconds, self._busy, self._step_start = {}, 0.0, self._mark
        return metrics

    def _advance(self) -> None:
        """Give the time since the last mark to every open name."""
        now = self._clock()
        passed = now - self._mark
        for name in self._open:
            self._seconds[name] = self._seconds.get(name, 0.0) + passed
        if not self._work.isdisjoint(self._open):
            self._busy += passed
        self._mark = now
