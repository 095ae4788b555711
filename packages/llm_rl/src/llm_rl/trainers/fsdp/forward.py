"""One forward pass over a micro-batch: logits at the positions that predict response tokens, packed or padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from llm_rl.trainers.fsdp.attention import PACKED
from llm_rl.trainers.fsdp.packing import pack_rows

# What stands in for a micro-batch without rows, whose forward and backward still take part in every collective.
_DUMMY = np.zeros(1, dtype=np.int64)


def response_logits(
    model: nn.Module,
    tokens: Sequence[np.ndarray],
    response_lengths: Sequence[int],
    *,
    attn_implementation: str,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Logits that predict each response token, row behind row.

    Args:
        model: A causal language model of transformers.
        tokens: int64 (L_i,) of each row, prompt and response.
        response_lengths: R_i of each row.
        attn_implementation: What the model was loaded with; it decides between packed and padded rows.
        device: Where the model computes.

    Returns:
        (Σ R_i, V) in the compute dtype. Without rows (0, V), still connected to every parameter.
    """
    if not tokens:
        tokens, response_lengths = [_DUMMY], [0]
    if is_packed(attn_implementation):
        return _packed_logits(model, tokens, response_lengths, attn_implementation, device)
    return _padded_logits(model, tokens, response_lengths, device)


def is_packed(attn_implementation: str) -> bool:
    """Whether this attention keeps packed documents apart."""
    return attn_implementation == PACKED or "flash" in attn_implementation


def _packed_logits(
    model: nn.Module,
    tokens: Sequence[np.ndarray],
    response_lengths: Sequence[int],
    attn_implementation: str,
    device: torch.device | str,
) -> Tensor:
    own_kernel = attn_implementation == PACKED
    pack = pack_rows(tokens, response_lengths, share_prompts=own_kernel, device=device)
    kernel_arguments: dict[str, Any] = {"pack": pack}
    if not own_kernel:
        kernel_arguments = {
            "cu_seq_lens_q": pack.cu_seqlens,
            "cu_seq_lens_k": pack.cu_seqlens,
            "max_length_q": pack.max_seqlen,
            "max_length_k": pack.max_seqlen,
        }
    output = model(
        input_ids=pack.input_ids[None],
        position_ids=pack.position_ids[None],
        use_cache=False,
        logits_to_keep=pack.predictors,
        **kernel_arguments,
    )
    return output.logits[0]


def _padded_logits(
    model: nn.Module, tokens: Sequence[np.ndarray], response_lengths: Sequence[int], device: torch.device | str
) -> Tensor:
    """Rows padded at their end to the longest; the attention mask comes from the lengths alone."""
    lengths = np.array([len(t) for t in tokens])
    responses = np.array(response_lengths)
    width = int(lengths.max())
    input_ids = np.zeros((len(tokens), width), dtype=np.int64)
    for i, row in enumerate(tokens):
        input_ids[i, : len(row)] = row
    attention_mask = np.arange(width) < lengths[:, None]
    first = lengths - responses - 1  # position that predicts the first response token
    kept_from, kept_to = int(first.min()), width - 1
    row_of = np.repeat(np.arange(len(tokens)), responses)
    position = np.concatenate([np.arange(f, f + r) for f, r in zip(first, responses, strict=True)])
    output = model(
        input_ids=torch.from_numpy(input_ids).to(device),
        attention_mask=torch.from_numpy(attention_mask.astype(np.int64)).to(device),
        position_ids=torch.arange(width, device=device).expand(len(tokens), width),
        use_cache=False,
        logits_to_keep=torch.arange(max(kept_from, 0), kept_to, device=device),
    )
    picked = torch.from_numpy(row_of).to(device), torch.from_numpy(position - max(kept_from, 0)).to(device)
    return output.logits[picked]
