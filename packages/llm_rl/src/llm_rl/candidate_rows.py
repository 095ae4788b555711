"""What a sample recorded of several tokens at each position, as arrays for a training row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llm_rl.algorithms.candidates import NO_CANDIDATE
from llm_rl.sample import Sample, TrainRow
from shared_runtime.rollout.types import name_sample


def padded_ids(ids: Sequence[Sequence[int]]) -> np.ndarray:
    """Token ids of R positions as int32 (R, K), K being the most that one has; -1 in unused slots."""
    return _padded(ids, max(map(len, ids), default=0), NO_CANDIDATE, np.int32)


def add_candidates(row: TrainRow, sample: Sample, num_candidates: int) -> None:
    """Give a row the likely tokens that score centering reads, `num_candidates` slots a position.

    Under filtered sampling they have to be the whole support, and the row's support becomes the same array.

    Raises:
        ValueError: If the sample lacks them, or a support has more tokens than there are slots.
    """
    ids, log_probs = sample.rollout_topk_token_ids, sample.rollout_topk_log_probs
    length = sample.response_length
    if ids is None or log_probs is None or sample.rollout_log_probs is None:
        raise ValueError(
            f"{name_sample(sample)} has no candidates of --rollout-top-logprobs-num: a generate or rollout function "
            "must give rollout_log_probs, rollout_topk_token_ids and rollout_topk_log_probs"
        )
    if not len(ids) == len(log_probs) == length or list(map(len, ids)) != list(map(len, log_probs)):
        raise ValueError(f"{name_sample(sample)}: its candidates don't fit its {length} response tokens")
    if max(map(len, ids), default=0) > num_candidates:
        raise ValueError(f"{name_sample(sample)} has more than --rollout-top-logprobs-num {num_candidates} candidates")
    for chosen, support in zip(ids, sample.rollout_support_ids or [], strict=sample.rollout_support_ids is not None):
        if chosen and len(chosen) < len(support):
            raise ValueError(
                f"{name_sample(sample)}: a token was drawn from {len(support)} that top-k and top-p had left, more "
                f"than the {num_candidates} of --rollout-top-logprobs-num"
            )
    row["rollout_topk_token_ids"] = _padded(ids, num_candidates, NO_CANDIDATE, np.int32)
    row["rollout_topk_log_probs"] = _padded(log_probs, num_candidates, -np.inf, np.float32)
    if sample.rollout_support_ids is not None:
        row["rollout_support_ids"] = row["rollout_topk_token_ids"]


def _padded(rows: Sequence[Sequence[float]], width: int, filler: float, dtype: type) -> np.ndarray:
    out: np.ndarray = np.full((len(rows), width), filler, dtype)
    for i, values in enumerate(rows):
        out[i, : len(values)] = values
    return out
