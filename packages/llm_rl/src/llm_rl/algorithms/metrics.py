"""What training reports of the policy update, per token or over all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shared_runtime.algorithms.masking import select

AllReduce = Callable[[Tensor], Tensor]


def ppo_kl(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """log π_old - log π_θ of each trainable token (`train/ppo_kl`), 0 elsewhere; (T,), no gradient."""
    return select(mask, old_log_probs.detach() - log_probs.detach())


def log_prob_abs_diff(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """|log π_train - log π_rollout| of each trainable token (`train/train_rollout_logprob_abs_diff`); (T,)."""
    return select(mask, log_probs.detach() - rollout_log_probs.detach()).abs()


def effective_sample_size(weights: Tensor, mask: Tensor, all_reduce_sum: AllReduce | None = None) -> Tensor:
    """(Σ w)² / (n · Σ w²) over the trainable tokens: 1 when all weights are equal, 1/n when one token has them all.

    Args:
        weights: (T,), non-negative.
        mask: (T,), non-zero means trainable.
        all_reduce_sum: Adds a tensor over ranks; with it the result is over all of them. Every rank must call.

    Returns:
        float64 scalar; 0 when nothing is trainable or every weight is 0.
    """
    w = select(mask, weights.detach()).double()
    sums = torch.stack([w.sum(), w.square().sum(), (mask != 0).sum().double()])
    if all_reduce_sum is not None:
        sums = all_reduce_sum(sums)
    total, squares, count = sums.unbind()
    return total.square() / (count * squares).clamp(min=torch.finfo(torch.float64).tiny)
