"""Documents one behind the other in a single row without padding, and what attention must know to keep them apart.

Every row of a micro-batch costs its tokens but the last (the last token is only predicted, never read). Rows that
answer the same prompt may share it: its tokens then stand in the pack once, and each response attends to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# A group of documents is padded for the attention kernel only; this bounds the padded scores over the needed ones,
# and the scores held at once (per head).
MAX_WASTE = 1.3
MAX_SCORES = 1 << 22


@dataclass(frozen=True, eq=False)
class AttentionGroup:
    """Documents of similar length that go through the attention kernel together.

    Attributes:
        queries: int64 (B, Q), indices of tokens in the pack. Shorter documents repeat index 0 at their end.
        keys: int64 (B, K), likewise; a document's keys are all its tokens in order, its queries the last of them.
        offsets: int64 (B,), position of each document's first query among its keys.
        aligned: Every offset is 0 and the keys are the queries: plain causal attention.
        common_offset: The offset that all documents share, else `None`.
    """

    queries: Tensor
    keys: Tensor
    offsets: Tensor
    aligned: bool
    common_offset: int | None


@dataclass(frozen=True, eq=False)
class Pack:
    """A packed micro-batch.

    Attributes:
        input_ids: int64 (T,).
        position_ids: int64 (T,), restarting at each document.
        predictors: int64 (R,), for each response token of each row, the index of the token before it.
        cu_seqlens: int32 (D + 1,), borders of the documents, for varlen kernels. Only without shared prompts.
        max_seqlen: Longest document.
        groups: The documents, gathered for attention without a varlen kernel.
        restore: int64 (T,), where each token stands among the groups' queries, padding left out of the count: the
            index into their concatenated (B · Q) outputs.
    """

    input_ids: Tensor
    position_ids: Tensor
    predictors: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    groups: tuple[AttentionGroup, ...]
    restore: Tensor

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.input_ids.numel()


@dataclass(frozen=True)
class _Document:
    """Tokens `start .. start + length` of the pack are the queries; `keys` are all tokens they may see, in order."""

    start: int
    length: int
    keys: np.ndarray


def pack_rows(
    tokens: Sequence[np.ndarray],
    response_lengths: Sequence[int],
    *,
    share_prompts: bool = False,
    device: torch.device | str = "cpu",
) -> Pack:
    """Pack rows without padding.

    Args:
        tokens: int64 (L_i,) of each row, prompt and response.
        response_lengths: R_i of each row; the prompt (L_i - R_i tokens) must not be empty.
        share_prompts: Let rows with equal prompts share them.
        device: Where the result lies.

    Raises:
        ValueError: For a row without a prompt.
    """
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    predictors: list[np.ndarray] = []
    documents: list[_Document] = []
    size = 0

    def append(piece: np.ndarray, first_position: int, seen: np.ndarray | None) -> np.ndarray:
        nonlocal size
        where = np.arange(size, size + len(piece))
        if len(piece):
            ids.append(piece)
            positions.append(np.arange(first_position, first_position + len(piece)))
            documents.append(_Document(size, len(piece), where if seen is None else np.concatenate([seen, where])))
            size += len(piece)
        return where

    prompts: dict[bytes, np.ndarray] = {}
    prompt_keys = _shared_prompts(tokens, response_lengths) if share_prompts else [None] * len(tokens)
    for row, (row_tokens, response, key) in enumerate(zip(tokens, response_lengths, prompt_keys, strict=True)):
        prompt = len(row_tokens) - response
        if prompt < 1:
            raise ValueError(f"row {row} has {len(row_tokens)} tokens and a response of {response}: it has no prompt")
        if key is None:
            # Nothing after the last response token is predicted, so that token need not be read.
            where = append(row_tokens[:-1] if response else row_tokens, 0, None)
        else:
            if key not in prompts:
                prompts[key] = append(row_tokens[:prompt], 0, None)
            where = np.concatenate([prompts[key], append(row_tokens[prompt:-1], prompt, prompts[key])])
        predictors.append(where[prompt - 1 : prompt - 1 + response])
    groups, restore = _group_documents(documents, size)
    lengths = [document.length for document in documents]

    def tensor(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Pack(
        input_ids=tensor(np.concatenate(ids).astype(np.int64)),
        position_ids=tensor(np.concatenate(positions).astype(np.int64)),
        predictors=tensor(np.concatenate(predictors).astype(np.int64)),
        cu_seqlens=tensor(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)),
        max_seqlen=max(lengths),
        groups=tuple(
            AttentionGroup(
                queries=tensor(queries),
                keys=tensor(keys),
                offsets=tensor(offsets),
                aligned=queries.shape == keys.shape and not offsets.any(),
                common_offset=int(offsets[0]) if (offsets == offsets[0]).all() else None,
            )
            for queries, keys, offsets in groups
        ),
        restore=tensor(restore),
    )


def _shared_prompts(tokens: Sequence[np.ndarray], response_lengths: Sequence[int]) -> list[bytes | None]:
    """A key for each row whose prompt another row has too (and which has a response), else `None`."""
    keys = [
        t[: len(t) - r].tobytes() if 0 < r < len(t) else None for t, r in zip(tokens, response_lengths, strict=True)
    ]
    count: dict[bytes, int] = {}
    for key in keys:
        if key is not None:
            count[key] = count.get(key, 0) + 1
    return [key if key is not None and count[key] > 1 else None for key in keys]


def _group_documents(
    documents: Sequence[_Document], num_tokens: int
) -> tuple[list[tuple[np.ndarray, np.ndarray, np.ndarray]], np.ndarray]:
    """(queries, keys, offsets) of each group, and where each token of the pack stands in their outputs."""
    ordered = sorted(documents, key=lambda d: (len(d.keys), d.length))
    batches: list[list[_Document]] = []
    needed = longest_query = longest_key = 0
    for document in ordered:
        scores = document.length * len(document.keys)
        query, key = max(longest_query, document.length), max(longest_key, len(document.keys))
        padded = (len(batches[-1]) + 1) * query * key if batches else 0
        if not batches or padded > MAX_WASTE * (needed + scores) or padded > MAX_SCORES:
            batches.append([])
            needed, query, key = 0, document.length, len(document.keys)
        batches[-1].append(document)
        needed, longest_query, longest_key = needed + scores, query, key
    groups = []
    restore = np.empty(num_tokens, dtype=np.int64)
    base = 0
    for batch in batches:
        starts = np.array([d.start for d in batch])[:, None]
        lengths = np.array([d.length for d in batch])[:, None]
        key_lengths = np.array([len(d.keys) for d in batch])
        # Padding repeats index 0; its outputs are never picked up.
        slots = np.arange(lengths.max())
        real = slots < lengths
        queries = np.where(real, starts + slots, 0)
        keys = np.zeros((len(batch), key_lengths.max()), dtype=np.int64)
        keys[np.arange(keys.shape[1]) < key_lengths[:, None]] = np.concatenate([d.keys for d in batch])
        restore[queries[real]] = base + np.flatnonzero(real)
        base += queries.size
        groups.append((queries, keys, key_lengths - lengths[:, 0]))
    return groups, restore
