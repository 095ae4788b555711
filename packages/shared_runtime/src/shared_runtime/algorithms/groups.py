"""Rewards relative to their group, in float64, without torch.

Groups are named by id, never by prompt text: two groups may hold the same prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

Scope = Literal["group", "batch"]

# Rewards closer than two float32 steps are equal: 0.9 that went through float32 is still 0.9.
_EQUAL_RTOL = 2.0 * float(np.finfo(np.float32).eps)


def normalize_rewards(
    rewards: Sequence[float] | np.ndarray,
    group_ids: Sequence[Any] | np.ndarray,
    *,
    mean_over: Scope = "group",
    std_over: Scope | None = "group",
    eps: float = 1e-6,
    unbiased: bool = True,
    rollout_ids: Sequence[Any] | np.ndarray | None = None,
) -> np.ndarray:
    """Centre rewards and divide by their standard deviation, each over the group or over the batch.

    `(r - mean) / (std + eps)`. Where the std is zero, or its scope holds a single rollout, nothing is divided;
    rewards that are all equal within the mean's scope give exactly 0. A group of one is never divided,
    whatever the std's scope, since it says nothing about spread.

    Args:
        rewards: One number a row, shape (N,).
        group_ids: The group of each row, shape (N,).
        mean_over: Scope of the mean.
        std_over: Scope of the standard deviation; `None` only centres.
        eps: Added to the standard deviation.
        unbiased: Bessel's correction (divide by n - 1); `False` is the population std that flow_grpo uses.
        rollout_ids: The rollout each row stems from, when one rollout gave several rows; it then counts once.

    Returns:
        float64 array, shape (N,), in the order of `rewards`.

    Raises:
        ValueError: If a reward is not finite, lengths differ, a rollout spans groups or has differing rewards.

    Papers: GRPO, arXiv:2402.03300; Flow-GRPO, arXiv:2505.05470; Dr.GRPO (no division), arXiv:2503.20783.
    """
    values, groups, counted = _prepare(rewards, group_ids, rollout_ids)
    if values.size == 0:
        return values
    batch = np.zeros_like(groups)
    group_size = np.bincount(groups, weights=counted)[groups]

    scope = groups if mean_over == "group" else batch
    mean, equal = _mean(values, scope, counted)
    centred = np.where(equal[scope], 0.0, values - mean[scope])
    if std_over is None:
        return centred

    scope = groups if std_over == "group" else batch
    mean, equal = _mean(values, scope, counted)
    count = np.bincount(scope, weights=counted)
    squares = np.bincount(scope, weights=counted * (values - mean[scope]) ** 2)
    std = np.sqrt(squares / np.maximum(count - 1.0 if unbiased else count, 1.0))
    divide = (~equal[scope]) & (count[scope] > 1) & (group_size > 1)
    return np.where(divide, centred / (std[scope] + eps), centred)


def normalize_group_rewards(
    rewards: Sequence[float] | np.ndarray,
    group_ids: Sequence[Any] | np.ndarray,
    *,
    std_normalization: bool = True,
    rollout_ids: Sequence[Any] | np.ndarray | None = None,
) -> np.ndarray:
    """Group-relative rewards of language-model training: `(r - mean) / (std_unbiased + 1e-6)` within each group.

    Args:
        rewards: One number a row, shape (N,).
        group_ids: The group of each row, shape (N,).
        std_normalization: Divide by the std (`grpo`, `gspo`, `cispo`); `False` only centres
            (`reinforce_plus_plus_baseline`, or `--disable-grpo-std-normalization`).
        rollout_ids: As in :func:`normalize_rewards`.

    Returns:
        float64 array, shape (N,). Groups of one, and groups whose rewards are all equal, give exactly 0.

    Raises:
        ValueError: As in :func:`normalize_rewards`.
    """
    return normalize_rewards(
        rewards, group_ids, std_over="group" if std_normalization else None, eps=1e-6, rollout_ids=rollout_ids
    )


def leave_one_out_rewards(
    rewards: Sequence[float] | np.ndarray,
    group_ids: Sequence[Any] | np.ndarray,
    *,
    rollout_ids: Sequence[Any] | np.ndarray | None = None,
) -> np.ndarray:
    """RLOO: each reward minus the mean of the *other* members of its group, `n/(n-1)·(r - mean)`.

    Args:
        rewards: One number a row, shape (N,).
        group_ids: The group of each row, shape (N,).
        rollout_ids: As in :func:`normalize_rewards`.

    Returns:
        float64 array, shape (N,). A group of one has no baseline and gives 0.

    Raises:
        ValueError: As in :func:`normalize_rewards`.

    Paper: Back to Basics, arXiv:2402.14740.
    """
    values, groups, counted = _prepare(rewards, group_ids, rollout_ids)
    if values.size == 0:
        return values
    mean, equal = _mean(values, groups, counted)
    size = np.bincount(groups, weights=counted)[groups]
    centred = np.where(equal[groups], 0.0, values - mean[groups])
    return centred * size / np.maximum(size - 1.0, 1.0)


def _prepare(
    rewards: Sequence[float] | np.ndarray,
    group_ids: Sequence[Any] | np.ndarray,
    rollout_ids: Sequence[Any] | np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Check the input; return values, dense group numbers, and 1 for the first row of each rollout, else 0."""
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1 or len(group_ids) != values.size:
        raise ValueError(f"{len(group_ids)} group ids for rewards of shape {values.shape}: one number a row is needed")
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        row = int(bad[0])
        raise ValueError(
            f"the reward of row {row} (group {group_ids[row]}) is {values[row]}: {bad.size} of {values.size} rewards "
            "are not finite; fix the reward function, or drop those samples before normalising"
        )
    groups = _dense(group_ids)
    if rollout_ids is None:
        return values, groups, np.ones_like(values)
    if len(rollout_ids) != values.size:
        raise ValueError(f"{len(rollout_ids)} rollout ids for {values.size} rewards")
    rollouts = _dense(rollout_ids)
    _, first, of_row = np.unique(rollouts, return_index=True, return_inverse=True)
    leader = first[of_row]
    for what, data in (("rewards", values), ("groups", groups)):
        differing = np.flatnonzero(data != data[leader])
        if differing.size:
            row = int(differing[0])
            raise ValueError(
                f"rows {int(leader[row])} and {row} stem from rollout {rollout_ids[row]} but have different {what}; "
                "the rows of one rollout share one reward and one group"
            )
    counted = np.zeros_like(values)
    counted[first] = 1.0
    return values, groups, counted


def _dense(ids: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Number ids 0, 1, … by first appearance; any hashable id will do."""
    numbers: dict[Any, int] = {}
    return np.fromiter((numbers.setdefault(i, len(numbers)) for i in ids), dtype=np.int64, count=len(ids))


def _mean(values: np.ndarray, scope: np.ndarray, counted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean of each scope, and whether its values are all equal (to float32 precision)."""
    n = int(scope.max()) + 1
    low, high, largest = np.full(n, np.inf), np.full(n, -np.inf), np.zeros(n)
    np.minimum.at(low, scope, values)
    np.maximum.at(high, scope, values)
    np.maximum.at(largest, scope, np.abs(values))
    mean = np.bincount(scope, weights=counted * values, minlength=n) / np.bincount(scope, weights=counted, minlength=n)
    return mean, (high - low) <= _EQUAL_RTOL * largest
