"""From scored samples to training rows: rewards relative to their group, loss masks, and the user's own conversion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from llm_rl.candidate_rows import add_candidates, padded_ids
from llm_rl.sample import Sample, TrainRow
from shared_runtime.algorithms.groups import leave_one_out_rewards, normalize_group_rewards
from shared_runtime.hooks import HookSpec
from shared_runtime.rollout.functions import post_processed_rewards
from shared_runtime.rollout.types import name_sample

REWARD_POST_PROCESS_HOOK = HookSpec(("args", "samples"))
CONVERT_HOOK = HookSpec(("args", "samples"))

Normalization = Literal["std", "center", "leave_one_out", "none"]
PostProcess = Callable[[Any, list[Sample]], tuple[Sequence[float], Sequence[float]]]

_NORMALIZATION: dict[str, Normalization] = {
    "grpo": "std",
    "gspo": "std",
    "cispo": "std",
    "rloo": "leave_one_out",
    "reinforce_plus_plus_baseline": "center",
    "reinforce_plus_plus": "none",
    "ppo": "none",
}

# Entry of a row by the key under which a custom conversion returns its list.
_REQUIRED = {"tokens": "tokens", "response_lengths": "response_length", "rewards": "reward"}
_OPTIONAL = {
    "raw_reward": "raw_reward",
    "loss_masks": "loss_mask",
    "sample_indices": "sample_index",
    "rollout_log_probs": "rollout_log_probs",
    "teacher_log_probs": "teacher_log_probs",
    "rollout_support_ids": "rollout_support_ids",
    "weight_versions": "weight_version",
}
_SEQUENCES: dict[str, type] = {
    "tokens": np.int64,
    "loss_mask": np.float32,
    "rollout_log_probs": np.float32,
    "teacher_log_probs": np.float32,
}


def reward_normalization(advantage_estimator: str, *, disable_std: bool = False) -> Normalization:
    """How an estimator wants its rewards relative to their group.

    Args:
        advantage_estimator: `--advantage-estimator`.
        disable_std: `--disable-grpo-std-normalization`.
    """
    chosen = _NORMALIZATION[advantage_estimator]
    return "center" if chosen == "std" and disable_std else chosen


def samples_to_rows(
    groups: Sequence[Sequence[Sample]],
    *,
    normalization: Normalization = "std",
    reward_key: str | None = None,
    post_process: PostProcess | None = None,
    convert: Callable[[Any, list[Sample]], Any] | None = None,
    num_candidates: int = 0,
    args: Any = None,
) -> list[TrainRow]:
    """Build one training row a sample, in the order of the groups.

    Statistics are those of the members that are there: a sample whose reward was dropped does not count, one that is
    marked `remove_sample` does, but none of its tokens is trained on.

    Args:
        groups: Scored groups.
        normalization: See `reward_normalization`.
        reward_key: The trained entry of dict rewards.
        post_process: `--custom-reward-post-process-path`: `(args, samples) -> (raw_rewards, rewards)`.
        convert: `--custom-convert-samples-to-train-data-path`: `(args, samples) -> dict` of lists, or training rows.
        num_candidates: `--rollout-top-logprobs-num`, likely tokens that a row has at each position.
        args: Passed to both hooks.

    Raises:
        ValueError: If a sample's parts don't fit together (it is named), or a hook returns something else.
    """
    samples = [sample for group in groups for sample in group]
    if convert is not None:
        return _converted(convert(args, samples), len(samples))
    if post_process is not None:
        raw, rewards = post_processed_rewards(post_process(args, samples), len(samples))
    else:
        raw = [sample.scalar_reward(reward_key) for sample in samples]
        rewards = _normalized(raw, [sample.group_index for sample in samples], normalization)
    return [sample_to_row(*parts, num_candidates=num_candidates) for parts in zip(samples, rewards, raw, strict=True)]


def sample_to_row(sample: Sample, reward: float, raw_reward: float, *, num_candidates: int = 0) -> TrainRow:
    """The row of one sample.

    Raises:
        ValueError: If something that the sample has of its response tokens doesn't have one entry a token.
    """
    length = sample.response_length
    if length < 1 or sample.prompt_length < 1:
        raise ValueError(f"{name_sample(sample)}: {sample.prompt_length} prompt and {length} response tokens")
    for what in ("loss_mask", "rollout_log_probs", "teacher_log_probs", "rollout_support_ids"):
        values = getattr(sample, what)
        if values is not None and len(values) != length:
            raise ValueError(f"{name_sample(sample)}: {len(values)} entries in {what} for {length} response tokens")
    if sample.remove_sample:
        mask = np.zeros(length, np.float32)
    elif sample.loss_mask is None:
        mask = np.ones(length, np.float32)
    else:
        mask = np.asarray(sample.loss_mask, np.float32)
    row = TrainRow(
        tokens=np.asarray(sample.tokens, np.int64),
        response_length=length,
        loss_mask=mask,
        reward=reward,
        raw_reward=raw_reward,
        sample_index=sample.index,
    )
    if sample.rollout_log_probs is not None:
        row["rollout_log_probs"] = np.asarray(sample.rollout_log_probs, np.float32)
    if sample.teacher_log_probs is not None:
        row["teacher_log_probs"] = np.asarray(sample.teacher_log_probs, np.float32)
    if sample.teacher_top is not None:
        row["teacher_top"] = sample.teacher_top
    if sample.rollout_support_ids is not None:
        row["rollout_support_ids"] = padded_ids(sample.rollout_support_ids)
    if num_candidates:
        add_candidates(row, sample, num_candidates)
    # A response that spans a weight update counts as drawn by the older weights.
    versions = [v for v in (sample.weight_version_dispatched, sample.weight_version_returned) if v is not None]
    if versions:
        row["weight_version"] = min(versions)
    return row


def _normalized(raw: list[float], groups: list[int], normalization: Normalization) -> list[float]:
    if normalization == "none":
        return raw
    if normalization == "leave_one_out":
        return leave_one_out_rewards(raw, groups).tolist()
    return normalize_group_rewards(raw, groups, std_normalization=normalization == "std").tolist()


def _converted(result: Any, count: int) -> list[TrainRow]:
    """Rows from what a custom conversion returned: rows already, or lists by name."""
    flag = "--custom-convert-samples-to-train-data-path"
    if isinstance(result, list) and all(isinstance(row, Mapping) for row in result):
        return [TrainRow(**row) for row in result]
    if not isinstance(result, Mapping):
        raise ValueError(f"{flag} returned {type(result).__name__}, expected a dict of lists")
    missing = [key for key in _REQUIRED if key not in result]
    if missing:
        raise ValueError(f"{flag}: the result lacks {', '.join(missing)}; it has {', '.join(sorted(result))}")
    names = _REQUIRED | {key: name for key, name in _OPTIONAL.items() if result.get(key) is not None}
    rows = len(result["tokens"])
    uneven = [f"{key} has {len(result[key])}" for key in names if len(result[key]) != rows]
    if uneven:
        raise ValueError(f"{flag}: tokens has {rows} entries, {', '.join(uneven)}")
    if rows == 0:
        raise ValueError(f"{flag}: no row is left of {count} samples")
    return [
        TrainRow(**{name: _entry(name, result[key][i]) for key, name in names.items()})  # type: ignore[typeddict-item]
        for i in range(rows)
    ]


def _entry(name: str, value: Any) -> Any:
    if name == "rollout_support_ids":
        return padded_ids(value)
    return np.asarray(value, _SEQUENCES[name]) if name in _SEQUENCES else value
