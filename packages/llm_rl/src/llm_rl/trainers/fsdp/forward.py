"""One forward pass over a micro-batch: logits or values where response tokens are predicted, packed or padded."""

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
    return _response_outputs(model, tokens, response_lengths, attn_implementation, device, has_logits_to_keep=True)


def response_values(
    model: nn.Module,
    tokens: Sequence[np.ndarray],
    response_lengths: Sequence[int],
    *,
    attn_implementation: str,
    device: torch.device | str = "cpu",
) -> Tensor:
    """A value model's prediction before each response token is drawn.

    Args:
        model: A token classifier of transformers with a single label.
        tokens: As in :func:`response_logits`, and so are the others.
        response_lengths: R_i of each row.
        attn_implementation: What the model was loaded with.
        device: Where the model computes.

    Returns:
        (Σ R_i,) in the compute dtype.
    """
    outputs = _response_outputs(model, tokens, response_lengths, attn_implementation, device, has_logits_to_keep=False)
    return outputs.squeeze(-1)


def is_packed(attn_implementation: str) -> bool:
    """Whether this attention keeps packed documents apart."""
    return attn_implementation == PACKED or "flash" in attn_implementation


def _response_outputs(
    model: nn.Module,
    tokens: Sequence[np.ndarray],
    response_lengths: Sequence[int],
    attn_implementation: str,
    device: torch.device | str,
    *,
    has_logits_to_keep: bool,
) -> Tensor:
    """(Σ R_i, outputs). Language models can leave out all other positions; token classifiers compute them all."""
    if not tokens:
        tokens, response_lengths = [_DUMMY], [0]
    if is_packed(attn_implementation):
        return _packed(model, tokens, response_lengths, attn_implementation, device, has_logits_to_keep)
    return _padded(model, tokens, response_lengths, device, has_logits_to_keep)


def _packed(
    model: nn.Module,
    tokens: Sequence[np.ndarray],
    response_lengths: Sequence[int],
    attn_implementation: str,
    device: torch.device | str,
    has_logits_to_keep: bool,
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
    if has_logits_to_keep:
        kernel_arguments["logits_to_keep"] = pack.predictors
    output = model(
        input_ids=pack.input_ids[None], position_ids=pack.position_ids[None], use_cache=False, **kernel_arguments
    )
    return output.logits[0] if has_logits_to_keep else output.logits[0, pack.predictors]


def _padded(
    model: nn.Module,
    tokens: Sequence[np.ndarray],
    response_lengths: Sequence[int],
    device: torch.device | str,
    has_logits_to_keep: bool,
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
    kept_from, kept_to = (max(int(first.min()), 0), width - 1) if has_logits_to_keep else (0, width)
    row_of = np.repeat(np.arange(len(tokens)), responses)
    position = np.concatenate([np.arange(f, f + r) for f, r in zip(first, responses, strict=True)])
    output = model(
        input_ids=torch.from_numpy(input_ids).to(device),
        attention_mask=torch.from_numpy(attention_mask.astype(np.int64)).to(device),
        position_ids=torch.arange(width, device=device).expand(len(tokens), width),
        use_cache=False,
        **({"logits_to_keep": torch.arange(kept_from, kept_to, device=device)} if has_logits_to_keep else {}),
    )
    picked = torch.from_numpy(row_of).to(device), torch.from_numpy(position - kept_from).to(device)
    return output.logits[picked]
