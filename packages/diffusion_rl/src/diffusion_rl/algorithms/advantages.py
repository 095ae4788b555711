"""Rewards to advantages, as diffusion trainers do it; without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shared_runtime.algorithms.groups import normalize_rewards

EPSILON = 1e-4


def diffusion_advantages(
    rewards: Sequence[float] | np.ndarray,
    group_ids: Sequence[Any] | np.ndarray,
    *,
    std_normalization: bool = True,
    globalize_mean: bool = False,
    globalize_std: bool = False,
    unbiased: bool = True,
) -> np.ndarray:
    """(r - mean)/(std + 1e-4), each over the sample's group or over the batch.

    A group of one has no std, so it is only centred; equal rewards give exactly 0. Groups go by id, never by prompt.

    Args:
        rewards: (N,).
        group_ids: (N,).
        std_normalization: Divide (`--disable-grpo-std-normalization` switches it off).
        globalize_mean: Mean over the batch (`--globalize-reward-mean`).
        globalize_std: Std over the batch (`--globalize-reward-std`), as flow_grpo's `global_std`.
        unbiased: Divide by n - 1; `False` is flow_grpo's population std.

    Returns:
        float64, (N,).

    Raises:
        ValueError: For a reward that is not finite.

    Paper: Flow-GRPO, arXiv:2505.05470.
    """
    return normalize_rewards(
        rewards,
        group_ids,
        mean_over="batch" if globalize_mean else "group",
        std_over=("batch" if globalize_std else "group") if std_normalization else None,
        eps=EPSILON,
        unbiased=unbiased,
    )
