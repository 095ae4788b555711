"""The critic's clipped regression loss, and how good its predictions are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llm_rl.algorithms.metrics import AllReduce
from shared_runtime.algorithms.masking import select


@dataclass(frozen=True, eq=False)
class ValueLoss:
    """Per token (T,), 0 at masked tokens: the loss, and 1 where clipping changed it."""

    loss: Tensor
    clipped: Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, value_clip: float | None = 0.2
) -> ValueLoss:
    """max((V - R)², (V_old + clip(V - V_old, ±value_clip) - R)²).

    Args:
        values: (T,), of the critic being trained. A value head is not divided by the temperature.
        old_values: (T,), of the critic that gave the advantages.
        returns: (T,), targets of `gae.gae`.
        mask: (T,), non-zero means trainable.
        value_clip: Largest change of a prediction that still improves the loss; `None` switches clipping off.

    Raises:
        ValueError: If `value_clip` is negative.

    Paper: PPO, arXiv:1707.06347.
    """
    if value_clip is not None and value_clip < 0:
        raise ValueError(f"value_clip must not be negative, not {value_clip}")
    values, old, returns = select(mask, values), select(mask, old_values.detach()), select(mask, returns.detach())
    plain = (values - returns).square()
    if value_clip is None:
        return ValueLoss(plain, torch.zeros_like(plain))
    bounded = (old + (values - old).clamp(-value_clip, value_clip) - returns).square()
    return ValueLoss(torch.maximum(plain, bounded), (bounded > plain).to(plain.dtype))


def explained_variance(
    values: Tensor, returns: Tensor, mask: Tensor, all_reduce_sum: AllReduce | None = None
) -> Tensor:
    """1 - Var(R - V) / Var(R) over the trainable tokens: 1 for a perfect critic, 0 for a constant one, negative below.

    Args:
        values: (T,), predictions.
        returns: (T,), what they were to predict.
        mask: (T,), non-zero means trainable.
        all_reduce_sum: Adds a tensor over ranks; with it the result is over all of them. Every rank must call.

    Returns:
        float64 scalar; 0 where the returns don't vary.
    """
    target = select(mask, returns.detach()).double()
    error = target - select(mask, values.detach()).double()
    sums = torch.stack(
        [(mask != 0).sum().double(), target.sum(), target.square().sum(), error.sum(), error.square().sum()]
    )
    if all_reduce_sum is not None:
        sums = all_reduce_sum(sums)
    count, target_sum, target_squares, error_sum, error_squares = sums.unbind()
    count = count.clamp(min=1)
    variance = target_squares - target_sum.square() / count
    unexplained = error_squares - error_sum.square() / count
    varies = variance > 1e-12 * target_squares
    return torch.where(varies, 1 - unexplained / variance.masked_fill(~varies, 1.0), 0.0)
