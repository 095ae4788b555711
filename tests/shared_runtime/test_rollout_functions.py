"""User rollout functions in every form, and the hooks on a finished rollout."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared_runtime.rollout.functions import apply_rollout_hooks, call_rollout_function
from shared_runtime.rollout.types import RolloutError, RolloutFnEvalOutput, RolloutFnTrainOutput, RolloutResult
from shared_runtime.sample import BaseSample

GROUPS = [[BaseSample(index=0), BaseSample(index=1)]]


def call(function: Any, evaluation: bool = False) -> Any:
    return asyncio.run(call_rollout_function(function, "args", 7, "source", evaluation=evaluation))


def test_forms_of_a_rollout_function() -> None:
    def plain(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        assert (args, rollout_id, data_source) == ("args", 7, "source")
        return {"set": {"rewards": [1.0]}} if evaluation else GROUPS

    async def modern(args: Any, rollout_id: int, source: Any, is_eval: bool) -> Any:
        return RolloutFnEvalOutput({}) if is_eval else RolloutFnTrainOutput(GROUPS, {"mine": 1.0})

    assert call(plain) == RolloutFnTrainOutput(GROUPS)
    assert call(plain, evaluation=True) == RolloutFnEvalOutput({"set": {"rewards": [1.0]}})
    assert call(modern) == RolloutFnTrainOutput(GROUPS, {"mine": 1.0})
    assert call(modern, evaluation=True) == RolloutFnEvalOutput({})


@pytest.mark.parametrize("result", [None, 3, [BaseSample()], [[]]])
def test_wrong_results_name_the_flag(result: Any) -> None:
    with pytest.raises(RolloutError, match="--rollout-function-path"):
        call(lambda args, rollout_id, data_source, evaluation: result)
    with pytest.raises(RolloutError, match="--eval-function-path"):
        call(lambda args, rollout_id, data_source, evaluation: result, evaluation=True)


def test_hooks_on_a_finished_rollout() -> None:
    kept = [[BaseSample(index=i, group_index=g) for i in (2 * g, 2 * g + 1)] for g in (0, 2)]
    rejected = [[BaseSample(index=2, group_index=1), BaseSample(index=3, group_index=1)]]
    result = RolloutResult(kept, rejected=rejected)
    seen: list[Any] = []

    def remove_odd(args: Any, data: list[list[BaseSample]]) -> None:
        for group in data:
            for sample in group:
                sample.remove_sample = sample.index % 2 == 1

    def look(args: Any, samples: list[list[BaseSample]], data_source: Any) -> None:
        seen.append((args, [s.index for group in samples for s in group], data_source))

    assert apply_rollout_hooks(result, "args", "source", sample_filter=remove_odd, all_samples=look) == 2
    assert seen == [("args", [0, 1, 2, 3, 4, 5], "source")]
    assert [s.remove_sample for group in result.samples for s in group] == [False, True] * 2
    assert apply_rollout_hooks(RolloutResult(rejected), None, None) == 0

    def remove_all(args: Any, data: list[list[BaseSample]]) -> None:
        for group in data:
            for sample in group:
                sample.remove_sample = True

    with pytest.raises(RolloutError, match="removed all 4 samples"):
        apply_rollout_hooks(result, None, None, sample_filter=remove_all)
