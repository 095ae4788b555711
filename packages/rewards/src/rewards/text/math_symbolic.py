"""Symbolic equality by math-verify, in a helper process with a limit on its processor time.

math-verify and sympy can take any time on a hostile answer, and their own time limits are signals, which do not work
off the main thread. Here both run in one helper process a caller's process, started when first needed. Inside it a
timer of processor time interrupts the work, so that a busy machine does not change a score; from outside, a helper
that does not come back (one long big-integer operation, say) is killed and replaced.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import re
import select
import subprocess
import sys
import threading
import time
from functools import lru_cache
from math import prod

logger = logging.getLogger(__name__)

CPU_LIMIT_S = 0.08
_WALL_LIMIT_S = 10.0
_START_LIMIT_S = 120.0
_MAX_CHARACTERS = 300
_MAX_PAIRS = 8
_MAX_DEPTH = 12
_MAX_POWER = 5_000
_UNSAFE = re.compile(r"\d{60}|\d{4,}\s*!|!\s*!|\)\s*!|\}\s*!|\^[^{}\\]\^|\\(?:int|sum|prod|lim|iint|oint)(?![a-zA-Z])")
_EXPONENT = re.compile(r"\^\s*(?:\{\s*-?(\d+)|(\d))")
_NESTED_EXPONENT = re.compile(r"\^\s*\{[^{}]*\d\s*\^")


def is_tractable(expression: str) -> bool:
    """Whether an expression is small enough to evaluate: no towers of powers, large factorials, sums or integrals."""
    if not expression or len(expression) > _MAX_CHARACTERS or _UNSAFE.search(expression):
        return False
    depth = deepest = 0
    for character in expression:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
            if depth < 0:
                return False
    if depth or deepest > _MAX_DEPTH or _NESTED_EXPONENT.search(expression):
        return False
    exponents = [int(braced or bare) for braced, bare in _EXPONENT.findall(expression) if len(braced) < 7]
    if len(exponents) < len(_EXPONENT.findall(expression)):
        return False
    return prod(max(exponent, 1) for exponent in exponents) <= _MAX_POWER


def symbolically_equal(pairs: tuple[tuple[str, str], ...], cpu_limit_s: float = CPU_LIMIT_S) -> bool:
    """Whether math-verify finds every pair (answer, label) equal. Safe in any thread and after a fork.

    Args:
        pairs: Normalised LaTeX expressions.
        cpu_limit_s: Processor seconds that all of them may take together.

    Returns:
        False also where an expression is intractable, does not parse, or the time is over.
    """
    if len(pairs) > _MAX_PAIRS or not all(is_tractable(text) for pair in pairs for text in pair):
        return False
    return _helper().equal(pairs, cpu_limit_s)


class SymbolicHelper:
    """The helper process and the pipe to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    def equal(self, pairs: tuple[tuple[str, str], ...], cpu_limit_s: float) -> bool:
        """One request: starts the helper where none runs, kills it when it outstays its limits."""
        with self._lock:
            self._start()
            assert self._process is not None
            if not self._ready:
                if self._read(time.monotonic() + _START_LIMIT_S, None) != b"ready\n":
                    self.stop()
                    raise RuntimeError("the math-verify helper process did not start: does `import math_verify` work?")
                self._ready = True
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps([cpu_limit_s, pairs]).encode() + b"\n")
                self._process.stdin.flush()
                reply = self._read(time.monotonic() + _WALL_LIMIT_S, cpu_limit_s + 0.1)
            except BrokenPipeError:
                reply = None
            if reply is None:
                logger.warning("math-verify was stopped after %.2f s of processor time on %.200r", cpu_limit_s, pairs)
                self.stop()
                self._start()  # ready again before it is needed
                return False
            return reply == b"1\n"

    def stop(self) -> None:
        """End the helper process, if one runs."""
        process, self._process, self._ready = self._process, None, False
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        if self._process is not None:
            self.stop()
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rewards.text.math_symbolic_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )

    def _read(self, deadline: float, cpu_limit_s: float | None) -> bytes | None:
        """One line from the helper; `None` once it is dead or over a limit."""
        assert self._process is not None
        assert self._process.stdout is not None
        spent = _cpu_seconds(self._process.pid)
        while time.monotonic() < deadline:
            readable, _, _ = select.select([self._process.stdout], [], [], 0.05)
            if readable:
                return self._process.stdout.readline() or None
            if cpu_limit_s is not None and _cpu_seconds(self._process.pid) - spent > cpu_limit_s:
                return None
        return None


def _cpu_seconds(pid: int) -> float:
    """Processor time of a process so far; 0 where the system does not say."""
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


@lru_cache(maxsize=1)
def _helper() -> SymbolicHelper:
    helper = SymbolicHelper()
    atexit.register(helper.stop)
    os.register_at_fork(after_in_child=_helper.cache_clear)
    return helper
