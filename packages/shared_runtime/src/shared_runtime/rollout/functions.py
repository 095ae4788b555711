"""Rollout functions (`--rollout-function-path`) and the hooks that run on a finished rollout."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, TypeVar

from shared_runtime.hooks import takes_keyword
from shared_runtime.rollout.types import RolloutError, RolloutFnEvalOutput, RolloutFnTrainOutput, RolloutResult
from shared_runtime.sample import BaseSample

S = TypeVar("S", bound=BaseSample)


async def call_rollout_function(
    function: Callable[..., Any], args: Any, rollout_id: int, data_source: Any, *, evaluation: bool = False
) -> RolloutFnTrainOutput[Any] | RolloutFnEvalOutput:
    """Call a user's rollout function, sync or async; plain lists (training) and dicts (evaluation) are wrapped.

    Args:
        function: `(args, rollout_id, data_source, evaluation=False)`.
        args: The run's flat arguments.
        rollout_id: Which rollout this is.
        data_source: Where it draws its prompts.
        evaluation: Whether an evaluation is asked for.

    Raises:
        RolloutError: If it returns something else.
    """
    if takes_keyword(function, "evaluation"):
        result = function(args, rollout_id, data_source, evaluation=evaluation)
    else:
        result = function(args, rollout_id, data_source, evaluation)
    if inspect.isawaitable(result):
        result = await result
    if evaluation:
        output = RolloutFnEvalOutput(result) if isinstance(result, dict) else result
        if isinstance(output, RolloutFnEvalOutput):
            return output
        raise RolloutError(f"--eval-function-path returned {type(result).__name__}, expected RolloutFnEvalOutput")
    train = RolloutFnTrainOutput(result) if isinstance(result, list) else result
    if not isinstance(train, RolloutFnTrainOutput):
        raise RolloutError(f"--rollout-function-path returned {type(result).__name__}, expected RolloutFnTrainOutput")
    if not all(isinstance(group, list) and group for group in train.samples):
        raise RolloutError("--rollout-function-path must return a list of groups, each a list of samples")
    return train


def apply_rollout_hooks(
    result: RolloutResult[S],
    args: Any,
    data_source: Any,
    *,
    sample_filter: Callable[[Any, list[list[S]]], None] | None = None,
    all_samples: Callable[[Any, list[list[S]], Any], None] | None = None,
) -> int:
    """Run `--rollout-sample-filter-path` and `--rollout-all-samples-process-path` on a finished rollout.

    Returns:
        How many samples are marked `remove_sample`.

    Raises:
        RolloutError: If nothing would be left to train on.
    """
    if sample_filter is not None:
        sample_filter(args, result.samples)
    if all_samples is not None:
        all_samples(args, result.all_samples(), data_source)
    removed = sum(sample.remove_sample for group in result.samples for sample in group)
    total = sum(len(group) for group in result.samples)
    if removed == total:
        raise RolloutError(f"--rollout-sample-filter-path removed all {total} samples of the rollout")
    return removed


def post_processed_rewards(result: Any, count: int) -> tuple[list[float], list[float]]:
    """What `--custom-reward-post-process-path` returned: raw rewards, and what is trained on, one a sample each.

    Raises:
        ValueError: If it is something else, or not finite.
    """
    flag = "--custom-reward-post-process-path"
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise ValueError(f"{flag} returned {type(result).__name__}, expected (raw_rewards, rewards)")
    raw, rewards = ([float(value) for value in part] for part in result)
    for name, values in (("raw rewards", raw), ("rewards", rewards)):
        if len(values) != count or not all(map(math.isfinite, values)):
            raise ValueError(f"{flag} returned {len(values)} {name} for {count} samples, or some that are not finite")
    return raw, rewards
