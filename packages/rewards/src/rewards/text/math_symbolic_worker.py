"""The helper process of `math_symbolic`: reads pairs as JSON lines, answers `1`, `0` or `t` (time over)."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import signal
import sys
from functools import lru_cache
from types import FrameType
from typing import Any

_MEMORY_BYTES = 3 << 30
_WARM_UP = (
    (r"\frac{1}{2}", "0.5"),
    (r"2\sqrt{3}+1", r"\sqrt{12}+1"),
    (r"(x+1)^2", "x^{2}+2x+1"),
    (r"\{1,\frac{\pi}{2}\}", r"\{\frac{\pi}{2},1\}"),
    ("y=2x+3", "y=3+2x"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    (r"e^{x}\sin x", r"\log_2 8"),
    ("2^{10}", "1024"),
    (r"\binom{5}{2}", "5!"),
)


class TimeOver(BaseException):
    """Raised by the timer. No `Exception`, so that no library catches it."""


def main() -> None:
    """Serve until the caller closes the pipe."""
    logging.disable(logging.CRITICAL)
    sys.set_int_max_str_digits(0)
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    import math_verify  # noqa: F401

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for pair in _WARM_UP:
        _equal(*pair)
    signal.signal(signal.SIGPROF, _on_timer)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies.write(b"ready\n")
    for line in sys.stdin.buffer:
        cpu_limit_s, pairs = json.loads(line)
        replies.write(_answer(pairs, cpu_limit_s) + b"\n")


def _answer(pairs: list[tuple[str, str]], cpu_limit_s: float) -> bytes:
    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, cpu_limit_s, 0.01)  # again, in case the first was swallowed
            equal = all(_equal(answer, label) for answer, label in pairs)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except TimeOver:
        signal.setitimer(signal.ITIMER_PROF, 0)
        return b"t"
    return b"1" if equal else b"0"


def _equal(answer: str, label: str) -> bool:
    from math_verify import verify

    try:
        gold, prediction = _parse(label), _parse(answer)
        if not gold or not prediction:
            return False
        quick = _quick(gold[0], prediction[0]) if len(gold) == len(prediction) == 1 else None
        return verify(list(gold), list(prediction), timeout_seconds=None) if quick is None else quick
    except Exception:
        return False


def _quick(gold: Any, prediction: Any) -> bool | None:
    """Decide what needs no simplification: equal once expanded, or different values at two points.

    `None` leaves the pair to math-verify: values that are close (its rounding decides), not finite, or no expressions.
    """
    import sympy

    if not isinstance(gold, sympy.Expr) or not isinstance(prediction, sympy.Expr):
        return None
    if not gold.has(sympy.Float) and not prediction.has(sympy.Float) and sympy.expand(gold - prediction) == 0:
        return True
    symbols = sorted(gold.free_symbols | prediction.free_symbols, key=str)
    for offset in (0, 5):
        point = {symbol: sympy.Rational(17 + 6 * index + offset, 11) for index, symbol in enumerate(symbols)}
        left, right = (complex(side.subs(point).evalf(20)) for side in (gold, prediction))
        if not abs(left - right) > 1e-3 * max(abs(left), abs(right), 1e-3) or abs(left - right) == math.inf:
            return None
        if any(abs(ratio - 100) < 1e-3 for ratio in (abs(left) / (abs(right) or 1), abs(right) / (abs(left) or 1))):
            return None  # a percentage
    return False


@lru_cache(maxsize=1024)
def _parse(text: str) -> tuple[Any, ...]:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    normalization = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    config = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=normalization)
    parsed = parse(f"${text}$", [config], fallback_mode="no_fallback", parsing_timeout=None)
    return tuple(item for item in parsed if not isinstance(item, str))


def _on_timer(signum: int, frame: FrameType | None) -> None:
    raise TimeOver


if __name__ == "__main__":
    main()
