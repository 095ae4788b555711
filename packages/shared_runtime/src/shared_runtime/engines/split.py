"""Which engine gets which of a batch of requests: pure, and the same for the same input."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


def split_by_cost(costs: Sequence[float], loads: Sequence[float]) -> list[list[int]]:
    """Split requests over engines so that the engines' loads come out even.

    Requests keep their order and each engine gets a contiguous run, so samples of one prompt mostly stay together,
    where they share a prefix.

    Args:
        costs: Estimated cost of each request, not negative.
        loads: What each engine still has to do, in the same unit.

    Returns:
        For each engine the positions of its requests; together every position once.
    """
    ends = list(accumulate(_shares(sum(costs), loads)))
    parts: list[list[int]] = [[] for _ in loads]
    before = 0.0
    for position, cost in enumerate(costs):
        # A request belongs where its middle falls.
        parts[min(bisect_left(ends, before + cost / 2), len(loads) - 1)].append(position)
        before += cost
    return parts


def _shares(total: float, loads: Sequence[float]) -> list[float]:
    """How much of `total` each engine takes so that the least loaded are filled up to one common level."""
    level = 0.0
    ordered = sorted(loads)
    for count in range(1, len(ordered) + 1):
        level = (total + sum(ordered[:count])) / count
        if count == len(ordered) or level <= ordered[count]:
            break
    return [max(level - load, 0.0) for load in loads]
