"""The critic's clipped regression loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
