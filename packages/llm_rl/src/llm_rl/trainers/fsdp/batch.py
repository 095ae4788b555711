"""A micro-batch: rows as ragged tensors over their response tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from llm_rl.algorithms.candidates import NO_CANDIDATE, CandidateLogProbs
from llm_rl.algorithms.opd import TopK
from llm_rl.algorithms.segments import Segments
from llm_rl.sample import TrainRow


@dataclass(eq=False)
class MicroBatch:
    """B rows with T response tokens in all, row behind row.

    Attributes:
        tokens: int64 (L_i,) of each row, on the host.
        response_lengths: R_i of each row.
        segments: Borders of the rows among the T tokens.
        targets: int64 (T,), the response tokens.
        mask: (T,), non-zero means trainable.
        rewards: (B,), as the driver normalised them.
        sample_num_tokens: (B,), trainable tokens of the whole sample that each row belongs to.
        rollout_log_probs: (T,), the engine's; NaN where a row has none.
        has_rollout_log_probs: bool (T,).
        stale: bool (T,), tokens that other weights than the current ones drew; their behaviour policy is
            `rollout_log_probs`.
        teacher_log_probs: (T,), a remote teacher's; NaN where a row has none.
        likely_tokens: What a remote teacher says of the student's likeliest tokens and of its own, (T, K) each, or
            `None` where the rows don't have it.
        support_ids: int64 (T, K), the tokens that top-k and top-p had left, -1 in unused slots, or `None` where all of
            the vocabulary could be drawn.
        candidates: Likely tokens at each position, int64 (T, K), -1 in unused slots, and their log-probs under the
            distribution drawn from, (T, K), or `None` where the rows don't have them.
        old_log_probs: (T,) under the weights before the rollout's first optimizer step, or `None` while those are the
            current ones.
        ref_log_probs: (T,) under the reference, or `None` without one.
        reverse_kl: (T,), the student's divergence from its teacher, or `None` without distillation.
        values: (T,), the critic's predictions before its first step on the rollout, or `None` without a critic.
        importance_weights: (T,), factors of the policy loss, or `None` without a rollout correction.
        advantages: (T,), or `None` before they are computed.
        returns: (T,), the critic's targets, or `None` without one.
    """

    tokens: list[np.ndarray]
    response_lengths: list[int]
    segments: Segments
    targets: Tensor
    mask: Tensor
    rewards: Tensor
    sample_num_tokens: Tensor
    rollout_log_probs: Tensor
    has_rollout_log_probs: Tensor
    stale: Tensor
    teacher_log_probs: Tensor
    likely_tokens: tuple[TopK, TopK] | None = None
    support_ids: Tensor | None = None
    candidates: CandidateLogProbs | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    reverse_kl: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None
    importance_weights: Tensor | None = None

    @property
    def total_lengths(self) -> list[int]:
        """L_i of each row."""
        return [len(t) for t in self.tokens]


def collate(
    rows: Sequence[TrainRow],
    sample_num_tokens: Sequence[int],
    *,
    policy_version: int | None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> MicroBatch:
    """Put rows together; an empty micro-batch is allowed.

    Args:
        rows: Training rows.
        sample_num_tokens: See :class:`MicroBatch`.
        policy_version: Version of the current weights. A row with another `weight_version` is stale. `None` where no
            policy ratio is taken (supervised losses).
        device: Where the tensors lie.
        dtype: Of masks, rewards and log-probs.

    Raises:
        ValueError: For a row whose parts don't fit, or a stale row without rollout log-probs; the sample is named.
    """
    lengths = [int(row["response_length"]) for row in rows]
    tokens = [np.asarray(row["tokens"], dtype=np.int64) for row in rows]
    targets, masks, behaviour, teacher = [], [], [], []
    known, stale = np.zeros(len(rows), dtype=bool), np.zeros(len(rows), dtype=bool)
    for i, (row, row_tokens, response) in enumerate(zip(rows, tokens, lengths, strict=True)):
        mask: Any = row.get("loss_mask")
        log_probs: Any = row.get("rollout_log_probs")
        version = row.get("weight_version")
        known[i] = log_probs is not None
        stale[i] = None not in (policy_version, version) and version != policy_version
        targets.append(row_tokens[len(row_tokens) - response :])
        masks.append(np.ones(response) if mask is None else mask)
        behaviour.append(log_probs if known[i] else np.full(response, np.nan))
        taught: Any = row.get("teacher_log_probs")
        teacher.append(np.full(response, np.nan) if taught is None else taught)
        if not (0 <= response < len(row_tokens) and len(masks[i]) == len(behaviour[i]) == response):
            _explain(row, len(row_tokens), response, len(masks[i]), len(behaviour[i]))
        if stale[i] and not known[i]:
            raise ValueError(
                f"{_name(row)} was drawn by weights of version {version}, now is {policy_version}: without rollout "
                "log-probs its importance ratio is unknown"
            )

    def tensor(parts: list[np.ndarray], kind: torch.dtype) -> Tensor:
        flat = np.concatenate(parts) if parts else np.empty(0)
        return torch.as_tensor(flat).to(device=device, dtype=kind)

    segments = Segments.of(lengths, device)
    return MicroBatch(
        tokens=tokens,
        response_lengths=lengths,
        segments=segments,
        targets=tensor(targets, torch.int64),
        mask=tensor(masks, dtype),
        rewards=torch.tensor([float(row.get("reward", 0.0)) for row in rows], dtype=dtype, device=device),
        sample_num_tokens=torch.tensor(list(sample_num_tokens), dtype=dtype, device=device),
        rollout_log_probs=tensor(behaviour, dtype),
        has_rollout_log_probs=segments.expand(torch.from_numpy(known).to(device)),
        stale=segments.expand(torch.from_numpy(stale).to(device)),
        teacher_log_probs=tensor(teacher, dtype),
        likely_tokens=_likely_tokens(rows, device, dtype),
        support_ids=_slots(rows, "rollout_support_ids", NO_CANDIDATE, device, torch.int64),
        candidates=_candidates(rows, device, dtype),
    )


def _likely_tokens(
    rows: Sequence[TrainRow], device: torch.device | str, dtype: torch.dtype
) -> tuple[TopK, TopK] | None:
    found = [row["teacher_top"] for row in rows if "teacher_top" in row]
    if not found:
        return None
    without = [_name(row) for row in rows if "teacher_top" not in row]
    if without:
        raise ValueError(f"{', '.join(without)}: no teacher's log-probs of likely tokens, which other rows have")

    def tensor(key: Literal["student_ids", "teacher_ids"], log_probs: bool) -> Tensor:
        name = f"{key}_log_probs" if log_probs else key
        parts = [np.asarray(top[name], np.float64 if log_probs else np.int64) for top in found]  # type: ignore[literal-required]
        return torch.as_tensor(np.concatenate(parts)).to(device=device, dtype=dtype if log_probs else torch.int64)

    student, teacher = (TopK(tensor(k, False), None, tensor(k, True)) for k in ("student_ids", "teacher_ids"))
    return student, teacher


def _candidates(rows: Sequence[TrainRow], device: torch.device | str, dtype: torch.dtype) -> CandidateLogProbs | None:
    ids = _slots(rows, "rollout_topk_token_ids", NO_CANDIDATE, device, torch.int64)
    log_probs = _slots(rows, "rollout_topk_log_probs", -np.inf, device, dtype)
    return None if ids is None or log_probs is None else CandidateLogProbs(ids, log_probs)


def _slots(
    rows: Sequence[TrainRow],
    key: Literal["rollout_support_ids", "rollout_topk_token_ids", "rollout_topk_log_probs"],
    filler: float,
    device: torch.device | str,
    dtype: torch.dtype,
) -> Tensor | None:
    """(R_i, K_i) of each row as one (T, K), filled up where a row has fewer slots; `None` if no row has them.

    Raises:
        ValueError: If only some rows have them, or one doesn't have its response's length; the sample is named.
    """
    found: list[np.ndarray] = [np.asarray(row[key]) for row in rows if key in row]
    if not found:
        return None
    for row in rows:
        if key not in row or len(row[key]) != row["response_length"]:  # type: ignore[arg-type]
            raise ValueError(f"{_name(row)} lacks {key} of its response tokens, which other rows have")
    width = max(part.shape[1] for part in found)
    whole = [np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=filler) for part in found]
    return torch.as_tensor(np.concatenate(whole)).to(device=device, dtype=dtype)


def _name(row: TrainRow) -> str:
    return f"sample {row.get('sample_index', '?')}"


def _explain(row: TrainRow, total: int, response: int, mask: int, log_probs: int) -> None:
    """Raise with what doesn't fit.

    Raises:
        ValueError: Always.
    """
    if not 0 <= response < total:
        raise ValueError(f"{_name(row)}: a response of {response} tokens in a row of {total} leaves no prompt")
    found = f"{mask} entries in the loss mask and {log_probs} rollout log-probs"
    raise ValueError(f"{_name(row)}: {found} for {response} response tokens")
