"""The decoding loop of the local engine: one batch of requests from prompt to end.

Why not `model.generate`: its own work is small beside the forward passes, but it can't do the two things that make RL
rollouts cheap. The samples of a group share their prompt, which is computed once here and its cache rows repeated; and
responses end at different lengths, so finished rows leave the batch. Model, cache classes and top-k/top-p are
`transformers`' own, and its `generate` is what the tests compare with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import PreTrainedModel

from llm_rl.engines.cache import append_cache
from llm_rl.engines.sampling import RowParams, draw, uniforms
from llm_rl.sample import GenerateRequest

COMPACT_AT = 0.75
"""Finished rows leave the batch when at most this share of it is unfinished, since rebuilding it copies the cache."""


@dataclass
class Row:
    """One request on its way.

    Attributes:
        request: What was asked.
        max_new_tokens: Its limit, or less where the context ends earlier.
        output_ids: Tokens drawn so far.
        log_probs: Their log-probabilities.
        top_ids: The likeliest tokens at each of those positions, where they were asked for.
        top_log_probs: Their log-probabilities.
        support_ids: The tokens that could be drawn at each of those positions, where they were asked for.
        stopped: Ended by a stop token or string.
    """

    request: GenerateRequest
    max_new_tokens: int
    output_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_ids: list[tuple[int, ...]] = field(default_factory=list)
    top_log_probs: list[tuple[float, ...]] = field(default_factory=list)
    support_ids: list[tuple[int, ...]] = field(default_factory=list)
    stopped: bool = False

    @property
    def finished(self) -> bool:
        """Nothing more will be drawn."""
        return self.stopped or len(self.output_ids) >= self.max_new_tokens


def decode(model: PreTrainedModel, rows: Sequence[Row], ends: Callable[[Row], bool]) -> None:
    """Fill in the rows' tokens and log-probabilities. The caller holds `torch.inference_mode`.

    Args:
        model: In evaluation mode.
        rows: One batch; rows with the same prompt share its computation.
        ends: Whether the token that was just added to a row ends it.

    Raises:
        FloatingPointError: The model gives logits that are not numbers; the message names the request.
    """
    device = model.device
    prompts = list(dict.fromkeys(row.request.input_ids for row in rows))
    ids, mask = left_pad(prompts, device)
    cache = append_cache(model.config, ids.shape[1] + max(row.max_new_tokens for row in rows))
    positions = None if mask is None else (mask.cumsum(dim=1) - 1).clamp_(min=0)
    logits = _forward(model, cache, ids, mask, positions)

    index = {prompt: i for i, prompt in enumerate(prompts)}
    batch = _Batch.of(rows, device)
    sources = [index[row.request.input_ids] for row in rows]
    if sources != list(range(len(prompts))):
        chosen = torch.tensor(sources, device=device)
        cache.reorder_cache(chosen)  # type: ignore[arg-type]
        logits = logits[chosen]
        mask = None if mask is None else mask[chosen]

    while True:
        tokens, log_probs, all_log_probs = draw(
            logits, batch.params, uniforms(batch.seeds, batch.lengths.astype(np.uint64))
        )
        _record_candidates(batch.rows, all_log_probs)
        for row, token, log_prob in zip(batch.rows, tokens.tolist(), log_probs.tolist(), strict=True):
            if not row.finished:
                _record(row, token, log_prob)
                row.stopped = ends(row)
        unfinished = [i for i, row in enumerate(batch.rows) if not row.finished]
        if not unfinished:
            return
        if len(unfinished) <= COMPACT_AT * len(batch.rows):
            chosen = torch.tensor(unfinished, device=device)
            cache.reorder_cache(chosen)  # type: ignore[arg-type]
            tokens, batch = tokens[chosen], batch.select(chosen)
            mask = None if mask is None else mask[chosen]
        mask = None if mask is None else torch.cat([mask, mask.new_ones(len(batch.rows), 1)], dim=1)
        positions = torch.from_numpy(batch.lengths).to(device).unsqueeze(1)
        logits = _forward(model, cache, tokens.unsqueeze(1), mask, positions)
        batch.lengths += 1


def left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prompts as one batch that ends at the same column.

    Returns:
        Token ids (B, P) and their mask (B, P), 1 on real tokens, or `None` where nothing is padded: without a mask
        attention takes its fast path.
    """
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, prompt in enumerate(prompts):
        ids[i, width - len(prompt) :] = torch.tensor(prompt)
        mask[i, width - len(prompt) :] = 1
    padded = any(len(prompt) < width for prompt in prompts)
    return ids.to(device), mask.to(device) if padded else None


@dataclass
class _Batch:
    """The rows that are in the batch now, and what is needed of each at every step."""

    rows: list[Row]
    params: RowParams
    seeds: np.ndarray  # uint64 (B,)
    lengths: np.ndarray  # int64 (B,): tokens so far, hence the position of the next one

    @classmethod
    def of(cls, rows: Sequence[Row], device: torch.device) -> _Batch:
        return cls(
            rows=list(rows),
            params=RowParams.of([row.request.params for row in rows], device),
            seeds=np.array([row.request.seed % 2**64 for row in rows], dtype=np.uint64),
            lengths=np.array([len(row.request.input_ids) for row in rows], dtype=np.int64),
        )

    def select(self, chosen: torch.Tensor) -> _Batch:
        indices = chosen.tolist()
        rows = [self.rows[i] for i in indices]
        return _Batch(rows, self.params.select(chosen), self.seeds[indices], self.lengths[indices])


def _forward(
    model: PreTrainedModel,
    cache: object,
    ids: torch.Tensor,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
) -> torch.Tensor:
    """Logits of the last column, (B, V), float32 or wider."""
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    logits: torch.Tensor = output.logits[:, -1]
    return logits if logits.dtype == torch.float64 else logits.float()


def _record_candidates(rows: Sequence[Row], log_probs: torch.Tensor) -> None:
    """Note the likeliest tokens of each unfinished row, and those that could be drawn, where its request asks for them.

    Args:
        rows: The batch.
        log_probs: (B, V) of the distributions drawn from.
    """
    most = max(row.request.params.top_logprobs_num for row in rows)
    if most:
        top = log_probs.topk(min(most, log_probs.shape[1]), dim=1)
        for row, ids, values in zip(rows, top.indices.tolist(), top.values.tolist(), strict=True):
            wanted = row.request.params.top_logprobs_num
            if wanted and not row.finished:
                known = [(token, value) for token, value in zip(ids, values, strict=True) if value > -math.inf][:wanted]
                row.top_ids.append(tuple(token for token, _ in known))
                row.top_log_probs.append(tuple(value for _, value in known))
    for i, row in enumerate(rows):
        if row.request.params.return_sampling_mask and not row.finished:
            row.support_ids.append(tuple((log_probs[i] > -torch.inf).nonzero()[:, 0].tolist()))


def _record(row: Row, token: int, log_prob: float) -> None:
    if not math.isfinite(log_prob):
        raise FloatingPointError(
            f"the model's logits for request {row.request.request_id!r} are not numbers after "
            f"{len(row.output_ids)} response tokens: its weights are probably NaN or infinite"
        )
    row.output_ids.append(token)
    row.log_probs.append(log_prob)
