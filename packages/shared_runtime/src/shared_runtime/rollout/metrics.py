"""Numbers about the rewards of a rollout that language and diffusion models share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shared_runtime.sample import BaseSample


def reward_metrics(groups: Sequence[Sequence[BaseSample]], reward_key: str | None = None) -> dict[str, float]:
    """Mean and spread of the raw rewards.

    Args:
        groups: Scored groups.
        reward_key: The trained entry of dict rewards.

    Returns:
        `rollout/raw_reward` (mean over samples), `rollout/zero_std_groups` (share of groups with equal rewards, which
        teach nothing), `passrate/pass@k`, and the mean of every numeric entry of dict rewards as
        `rollout/reward/<key>_mean`.
    """
    rewards = [[sample.scalar_reward(reward_key) for sample in group] for group in groups]
    flat = [reward for group in rewards for reward in group]
    if not flat:
        return {}
    metrics = {
        "rollout/raw_reward": math.fsum(flat) / len(flat),
        "rollout/zero_std_groups": sum(min(group) == max(group) for group in rewards) / len(rewards),
    }
    metrics |= {f"passrate/pass@{k}": value for k, value in pass_rates(rewards).items()}
    return metrics | _entry_means(groups)


def pass_rates(rewards: Sequence[Sequence[float]], threshold: float = 1.0) -> dict[int, float]:
    """Unbiased pass@k for k = 1, 2, 4, … up to the size of the smallest group, averaged over groups.

    A sample passes with a reward of at least `threshold`. pass@k = 1 - C(n-c, k) / C(n, k) for c passes among n
    (Chen et al. 2021, arXiv:2107.03374).
    """
    smallest = min((len(group) for group in rewards), default=0)
    counts = [(len(group), sum(reward >= threshold for reward in group)) for group in rewards]
    rates: dict[int, float] = {}
    k = 1
    while k <= smallest:
        rates[k] = math.fsum(1.0 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts) / len(counts)
        k *= 2
    return rates


def _entry_means(groups: Sequence[Sequence[BaseSample]]) -> dict[str, float]:
    sums: dict[str, list[float]] = {}
    for group in groups:
        for sample in group:
            if isinstance(sample.reward, dict):
                for key, value in sample.reward.items():
                    if isinstance(value, int | float) and math.isfinite(value):
                        sums.setdefault(key, []).append(float(value))
    return {f"rollout/reward/{key}_mean": math.fsum(values) / len(values) for key, values in sums.items()}
