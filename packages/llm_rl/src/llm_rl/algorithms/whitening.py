"""Whitening of advantages over the trainable tokens of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_rl.algorithms.metrics import AllReduce
from shared_runtime.algorithms.masking import select


def whiten(values: Tensor, mask: Tensor, *, all_reduce_sum: AllReduce | None = None, shift_mean: bool = True) -> Tensor:
    """(A - μ) / √(σ² + 1e-8), with mean μ and Bessel-corrected variance σ² over the trainable tokens of all ranks.

    Two reductions, sum and then squared deviations, in float64: the result does not depend on how the tokens are
    spread over ranks. Every rank must call it, one without tokens too.

    Args:
        values: (T,).
        mask: (T,), non-zero means trainable.
        all_reduce_sum: Adds a float64 tensor over data- (and context-) parallel ranks; `None` for one rank.
        shift_mean: `False` keeps the mean: (A - μ)/√(…) + μ.

    Returns:
        (T,) in the dtype of `values`, 0 at masked tokens.

    Raises:
        ValueError: If no rank has a trainable token.
    """
    reduce = all_reduce_sum or (lambda x: x)
    chosen = mask != 0
    x = select(chosen, values).double()
    total, count = reduce(torch.stack([x.sum(), chosen.sum().double()])).unbind()
    if count.item() == 0:
        raise ValueError("whitening needs a trainable token, but the loss mask is 0 on every rank")
    mean = total / count
    centred = select(chosen, x - mean)
    variance = reduce(centred.square().sum()) / (count - 1).clamp(min=1)
    white = centred * torch.rsqrt(variance + 1e-8)
    if not shift_mean:
        white = select(chosen, white + mean)
    return white.to(values.dtype)
