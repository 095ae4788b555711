"""Splitting numbers into parts of nearly equal sum, and into bins of bounded sum."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def karmarkar_karp(weights: Sequence[int], num_parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Partition by the largest differencing method: repeatedly merge the two most unequal partial solutions.

    Args:
        weights: Non-negative numbers.
        num_parts: Parts wanted; some may stay empty.
        equal_size: Give all parts the same number of items, up to one.

    Returns:
        Indices into `weights`, ascending in each part.

    Paper: Karmarkar and Karp, "The differencing method of set partitioning" (1982).
    """
    if num_parts < 1:
        raise ValueError(f"num_parts must be at least 1, got {num_parts}")
    # A partial solution: (sum, items) per part, largest sum first. The heap orders by spread, ties by age.
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    solutions: list[list[tuple[int, list[int]]]] = []
    if equal_size:
        for start in range(0, len(order), num_parts):
            block = [(weights[i], [i]) for i in order[start : start + num_parts]]
            solutions.append(block + [(0, []) for _ in range(num_parts - len(block))])
    else:
        solutions = [[(weights[i], [i]), *((0, []) for _ in range(num_parts - 1))] for i in order]
    heap = [(s[-1][0] - s[0][0], age, s) for age, s in enumerate(solutions)]
    heapq.heapify(heap)
    age = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = [(a[0] + b[0], _join(a[1], b[1])) for a, b in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], age, merged))
        age += 1
    if not heap:
        return [[] for _ in range(num_parts)]
    return [sorted(items) for _, items in heap[0][2]]


def _join(a: list[int], b: list[int]) -> list[int]:
    """Append the shorter list to the longer one, which keeps all merges together in O(n log n)."""
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    longer.extend(shorter)
    return longer


def first_fit_decreasing(weights: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack into few bins whose sums stay within `capacity`; indices ascending in each bin.

    Raises:
        ValueError: If a single weight exceeds the capacity.
    """
    bins: list[list[int]] = []
    free: list[int] = []
    for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
        if weights[i] > capacity:
            raise ValueError(f"item {i} weighs {weights[i]}, above the capacity {capacity}")
        for b, room in enumerate(free):
            if weights[i] <= room:
                bins[b].append(i)
                free[b] -= weights[i]
                break
        else:
            bins.append([i])
            free.append(capacity - weights[i])
    return [sorted(b) for b in bins]


def balanced_bins(weights: Sequence[int], num_bins: int, capacity: int) -> list[list[int]]:
    """Spread over exactly `num_bins` bins, evenly where that keeps every bin within `capacity`.

    Raises:
        ValueError: If first-fit-decreasing needs more bins than that.
    """
    even = karmarkar_karp(weights, num_bins)
    if all(sum(weights[i] for i in b) <= capacity for b in even):
        return even
    tight = first_fit_decreasing(weights, capacity)
    if len(tight) > num_bins:
        raise ValueError(f"{len(weights)} items need {len(tight)} bins of {capacity}, not {num_bins}")
    return tight + [[] for _ in range(num_bins - len(tight))]
