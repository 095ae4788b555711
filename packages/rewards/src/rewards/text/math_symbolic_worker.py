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
_WARM_UP = (  # forms that the grammar is slow on when it meets them first; equal, so that all of it runs
    (r"\frac{1}{2}|x|", r"|x|/2"),
    (r"x^2+2x+1=0", "x^{2}+2x+1=0"),
    (r"\{1,\frac{\pi}{2}\}", r"\{\frac{\pi}{2},1\}"),
    ("2x+3y=6", "3y+2x=6"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\\frac{4}{2}\end{pmatrix}"),
    (r"e^{x}\sin 2x+\log_2 8", r"e^{x}\sin 2x+3"),
    (r"\binom{5}{2}+x_1", "10+x_{1}"),
    (r"5!\cdot 3", "360"),
    (r"3.141593", r"\pi"),
    (r"\sin^2(x)+\cos^2(x)", "1"),
    (r"x\le 3", r"3\ge x"),
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
        quick = _quick(_read(label), _read(answer))
        if quick is not None:
            return quick
        gold, prediction = _parse(label), _parse(answer)
        return bool(gold and prediction and verify(list(gold), list(prediction), timeout_seconds=None))
    except Exception:
        return False


def _quick(gold: Any, prediction: Any) -> bool | None:
    """Decide by values: the same to 50 digits at three points is equal, different in the third digit is not.

    `None` leaves the pair to math-verify: values that are merely close (its rounding decides), percentages of each
    other, not finite, or an expression that was not read.
    """
    import sympy

    if gold is None or prediction is None:
        return None
    if gold == prediction:
        return True
    symbols = sorted(gold.free_symbols | prediction.free_symbols, key=str)
    for offset in (0, 5, 23) if symbols else (0,):
        point = {symbol: sympy.Rational(17 + 6 * index + offset, 11) for index, symbol in enumerate(symbols)}
        left, right = (side.subs(point).evalf(60) for side in (gold, prediction))
        size = max(abs(complex(left)), abs(complex(right)), 1e-3)
        gap = abs(complex((left - right).evalf(60)))
        if gap <= 1e-50 * size:
            continue
        ratio = abs(complex(left)) / (abs(complex(right)) or 1)
        if gap > 1e-3 * size and gap < math.inf and abs(ratio - 100) > 1e-3 and abs(ratio - 0.01) > 1e-7:
            return False
        return None
    return True


@lru_cache(maxsize=1024)
def _read(text: str) -> Any:
    from rewards.text.math_reader import read

    return read(text)


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
