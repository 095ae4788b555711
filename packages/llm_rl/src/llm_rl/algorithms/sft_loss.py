"""Supervised fine-tuning: the loss of given responses, and the mask that ends at the end of sequence."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from llm_rl.algorithms.segments import Segments
from shared_runtime.algorithms.masking import select


def sft_loss(log_probs: Tensor, mask: Tensor) -> Tensor:
    """-log π of each trainable token, 0 elsewhere; (T,).

    With per-token weights the sum is the negative mean log-probability over the loss mask, several turns included.
    """
    return -select(mask, log_probs)


def mask_through_eos(tokens: Tensor, segments: Segments, eos_ids: Collection[int], pad_id: int | None = None) -> Tensor:
    """1 from the first response token through the first end-of-sequence token, both included; (T,) float32.

    Args:
        tokens: int64 (T,), response tokens, perhaps padded behind.
        segments: Borders of the responses, padding included.
        eos_ids: All ids that end a sequence.
        pad_id: Also masked from its first appearance at the end of a response without an end-of-sequence token. When it
            is one of `eos_ids` the first one is an end and stays.
    """
    ends = torch.isin(tokens, torch.tensor(sorted(eos_ids), dtype=tokens.dtype, device=tokens.device))
    before = torch.cumsum(ends.long(), 0) - ends.long()
    # Ends seen in the token's own response, itself excluded.
    starts = torch.cumsum(segments.lengths, 0) - segments.lengths
    per_sample = before[starts.clamp(max=max(segments.num_tokens - 1, 0))] if segments.num_tokens else starts
    trained = before == segments.expand(per_sample)
    if pad_id is not None and pad_id not in eos_ids:
        last_real = segments.last(tokens != pad_id)
        position = torch.arange(segments.num_tokens, device=tokens.device)
        end = segments.sum(torch.where(last_real, position + 1, 0))
        trained &= position < segments.expand(end)
    return trained.float()
