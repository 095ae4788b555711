"""From the loss of each token to one number, with denominators that span the whole optimizer step.

The weights hold the global denominator, so losses and gradients of micro-batches and ranks are *summed*. How a step is
cut into micro-batches, packed, or spread over ranks then can't change it. A rank without samples contributes
`masked_sum` of empty tensors, which is 0 and has a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llm_rl.algorithms.segments import Segments
from shared_runtime.algorithms.masking import select


def token_weights(
    mask: Tensor,
    segments: Segments,
    *,
    per_token: bool,
    global_num_samples: int,
    global_num_tokens: int,
    sample_num_tokens: Tensor | None = None,
    constant: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The weight of each token in the loss.

    - per sample (default of the field's trainers): mask / (max(n_i, 1) · N), the mean over samples of each sample's
      mean over its n_i trainable tokens. A sample without trainable tokens counts in N and adds 0.
    - per token (`--calculate-per-token-loss`, DAPO): mask / max(T, 1), the mean over all trainable tokens.
    - `constant` c (Dr.GRPO): mask / (c · N), usually with c the longest allowed response, so that a token weighs the
      same in a short and in a long sample.

    Args:
        mask: (T,), non-zero means trainable.
        segments: Borders of the rows.
        per_token: Per token instead of per sample.
        global_num_samples: N, samples of the optimizer step over all ranks; a rollout that gave several rows is one.
        global_num_tokens: T, trainable tokens of the optimizer step over all ranks.
        sample_num_tokens: (B,), trainable tokens of the whole rollout that each row is part of; default: the row's own.
        constant: Divisor in place of n_i.
        dtype: Of the result.

    Returns:
        (T,), exactly 0 where masked.

    Raises:
        ValueError: If `constant` comes with `per_token`, or isn't positive, or shapes differ.

    Papers: GRPO, arXiv:2402.03300; DAPO, arXiv:2503.14476; Dr.GRPO, arXiv:2503.20783.
    """
    if mask.shape != segments.ids.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)} for {segments.num_tokens} response tokens")
    selected = (mask != 0).to(dtype)
    if constant is not None:
        if per_token:
            raise ValueError("a constant divisor replaces the length of a sample; it has no meaning with per_token")
        if constant <= 0:
            raise ValueError(f"the constant divisor must be positive, not {constant}")
        return selected / (constant * max(global_num_samples, 1))
    if per_token:
        return selected / max(global_num_tokens, 1)
    counts = segments.count(mask) if sample_num_tokens is None else sample_num_tokens
    return selected / (segments.expand(counts.to(dtype).clamp(min=1)) * max(global_num_samples, 1))


def masked_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Σ values · weights over the tokens whose weight is not 0, whatever stands at the others; a scalar.

    Args:
        values: (T,).
        weights: (T,), from :func:`token_weights`; no gradient flows into them.
    """
    return (select(weights, values) * weights.detach().to(values.dtype)).sum()
