"""Attention over a pack of documents for devices without a varlen kernel, registered with transformers.

Linear layers run on the pack as it is. Only for the attention kernel are documents of similar length gathered into
padded groups, so documents never see each other and almost nothing is computed for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from llm_rl.trainers.fsdp.packing import AttentionGroup, Pack

PACKED = "tandem_packed"

# Up to this many keys, two batched matrix products and a softmax beat the CPU's fused kernel, whose cost per call and
# head is fixed.
SHORT = 128


def register_packed_attention() -> None:
    """Make `attn_implementation="tandem_packed"` known to transformers. Doing so twice is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, _no_mask)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The pack knows the borders; there is no mask to build."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    pack: Pack | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each document.

    Args:
        module: The attention layer (unused, as transformers calls it).
        query: (1, H_q, T, D).
        key: (1, H_kv, T, D).
        value: (1, H_kv, T, D_v).
        attention_mask: Unused.
        scaling: Factor of the scores, default D^-1/2.
        sliding_window: A token sees at most this many tokens, itself included.
        softcap: c·tanh(score / c) in place of the scores.
        pack: The documents.
        s_aux: Attention sinks, which this kernel does not have.
        kwargs: What other kernels take.

    Returns:
        (1, T, H_q, D_v) and no weights.

    Raises:
        ValueError: Without a pack.
        NotImplementedError: For attention sinks.
    """
    if pack is None:
        raise ValueError(f"attention {PACKED!r} runs on packed batches only: the model did not pass `pack` on")
    if s_aux is not None:
        raise NotImplementedError("attention sinks can't be packed here; use --attn-implementation eager")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    heads, value_dim = q.shape[1], v.shape[2]
    outputs = []
    for group in pack.groups:
        num_keys = group.keys.shape[1]
        window = sliding_window if sliding_window is not None and sliding_window < num_keys else None
        parts = (_gather(q, group.queries), _gather(k, group.keys), _gather(v, group.keys))
        if num_keys <= SHORT or softcap is not None:
            out = _short_attention(*parts, group, scaling, window, softcap)
        else:
            out = _long_attention(*parts, group, scaling, window)
        outputs.append(out.reshape(-1, heads * value_dim))
    flat = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return flat.index_select(0, pack.restore).view(1, -1, heads, value_dim), None


def _gather(x: Tensor, indices: Tensor) -> Tensor:
    """(T, H, D) to (B, L, H, D)."""
    flat = x.reshape(x.shape[0], -1).index_select(0, indices.reshape(-1))
    return flat.view(*indices.shape, *x.shape[1:])


def _visible(group: AttentionGroup, window: int | None) -> Tensor:
    """Which key each query sees: bool (Q, K) if all documents agree, else (B, Q, K)."""
    num_queries, num_keys = group.queries.shape[1], group.keys.shape[1]
    device = group.queries.device
    key = torch.arange(num_keys, device=device)
    query = torch.arange(num_queries, device=device)
    if group.common_offset is not None:
        query = query + group.common_offset
    else:
        query = query + group.offsets[:, None]
    # Queries that are padding count as the last position, so that a window never leaves them without any key (NaN).
    query = query.clamp(max=num_keys - 1)
    visible = key <= query[..., None]
    if window is not None:
        visible &= key > query[..., None] - window
    return visible


def _short_attention(
    q: Tensor, k: Tensor, v: Tensor, group: AttentionGroup, scaling: float, window: int | None, softcap: float | None
) -> Tensor:
    """(B, Q, H, D) from two batched products. The query heads of a key head are stacked along the query axis."""
    batch, num_queries, heads, dim = q.shape
    num_keys, kv_heads = k.shape[1:3]
    per_kv = heads // kv_heads
    q = (q * scaling).view(batch, num_queries, kv_heads, per_kv, dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(batch * kv_heads, per_kv * num_queries, dim)
    k = k.permute(0, 2, 3, 1).reshape(batch * kv_heads, dim, num_keys)
    v = v.transpose(1, 2).reshape(batch * kv_heads, num_keys, -1)
    scores = torch.bmm(q, k)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = _visible(group, window)
    bias = torch.zeros(visible.shape, dtype=scores.dtype, device=q.device).masked_fill_(~visible, float("-inf"))
    if bias.ndim == 3:
        bias = bias[:, None, None]
    scores = scores.view(batch, kv_heads, per_kv, num_queries, num_keys) + bias
    wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
    weights = scores.softmax(dim=-1, dtype=wide).to(v.dtype)
    out = torch.bmm(weights.view(batch * kv_heads, per_kv * num_queries, num_keys), v)
    out = out.view(batch, kv_heads, per_kv, num_queries, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, num_queries, heads, -1)


def _long_attention(
    q: Tensor, k: Tensor, v: Tensor, group: AttentionGroup, scaling: float, window: int | None
) -> Tensor:
    """(B, Q, H, D) from torch's fused kernels."""
    causal = group.aligned and window is None
    mask = None
    if not causal:
        mask = _visible(group, window)
        mask = mask[:, None] if mask.ndim == 3 else mask
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        scale=scaling,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)
