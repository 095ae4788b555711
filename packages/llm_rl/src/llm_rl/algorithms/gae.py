"""Generalised advantage estimation over the trainable tokens of ragged samples."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_rl.algorithms.scan import discounted_suffix_sum
from llm_rl.algorithms.segments import Segments
from shared_runtime.algorithms.masking import select


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, segments: Segments, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """`ppo`: δ_t = r_t + γ·V_{t'} - V_t and A_t = δ_t + γλ·A_{t'}, with t' the next trainable token of the sample.

    Masked tokens (tool output) neither decay nor receive; beyond the last trainable token V and A are 0, since a
    response is an episode of its own.

    Args:
        rewards: (T,), of `advantages.token_rewards`.
        values: (T,), the critic's prediction at each token; no gradient flows into it.
        mask: (T,), non-zero means trainable.
        segments: Borders of the samples.
        gamma: Discount γ.
        lam: λ, 0 for one-step differences, 1 for returns minus values.

    Returns:
        Advantages (T,) and value targets A + V (T,), both 0 at masked tokens.

    Raises:
        ValueError: If γ or γλ is outside [0, 1].

    Paper: arXiv:1506.02438.
    """
    if not 0 <= gamma <= 1 or not 0 <= lam <= 1:
        raise ValueError(f"gamma and lambda must be between 0 and 1, not {gamma} and {lam}")
    chosen = mask != 0
    v, ids = values.detach()[chosen], segments.ids[chosen]
    following = torch.zeros_like(v)
    following[:-1] = v[1:].masked_fill(ids[1:] != ids[:-1], 0.0)
    delta = torch.zeros_like(values)
    delta[chosen] = rewards[chosen] + gamma * following - v
    advantages = discounted_suffix_sum(delta, mask, segments, gamma * lam)
    return advantages, select(mask, advantages + values.detach())
