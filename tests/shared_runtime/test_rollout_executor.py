"""The rollout executor: the same batch whatever the timing, nothing lost or doubled, every failure with its sample.

Generation and rewards are stand-ins here: they finish in a chosen order, raise, or give a chosen number.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared_runtime.data import PromptDataset, PromptRow, RolloutDataSource
from shared_runtime.placement.failures import WorkerDied
from shared_runtime.rollout.executor import FixedSource, RolloutExecutor
from shared_runtime.rollout.filters import FilterOutput, check_reward_nonzero_std
from shared_runtime.rollout.types import RolloutError, RolloutResult
from shared_runtime.sample import BaseSample, Status

N = 3
Source = RolloutDataSource[BaseSample]


def source(num_prompts: int = 100) -> Source:
    rows = [PromptRow(f"p{i}", i, {"row": i}) for i in range(num_prompts)]
    return RolloutDataSource(PromptDataset(rows), BaseSample, n_samples_per_prompt=N)


def generate_after(delay: Callable[[BaseSample], int]) -> Callable[[BaseSample], Awaitable[BaseSample]]:
    """A generation that takes `delay(sample)` ticks of the event loop."""

    async def generate(sample: BaseSample) -> BaseSample:
        for _ in range(delay(sample)):
            await asyncio.sleep(0)
        sample.status = Status.COMPLETED
        sample.metadata["generated"] = True
        return sample

    return generate


async def reward_of_label(sample: BaseSample) -> float:
    """Groups with an even label get mixed rewards, the others all the same."""
    return float(sample.index % N == 0) if sample.label % 2 == 0 else 1.0


def run(executor: RolloutExecutor[BaseSample], data: Any, num_groups: int) -> RolloutResult[BaseSample]:
    return asyncio.run(executor.run(data, num_groups))


instantly = generate_after(lambda sample: 0)


def group_ids(groups: list[list[BaseSample]]) -> list[int]:
    return [group[0].group_index for group in groups]


def test_batch_without_filter() -> None:
    data = source()
    result = run(RolloutExecutor(generate=instantly, score=reward_of_label), data, 4)
    assert [[s.index for s in g] for g in result.samples] == [[3 * g + i for i in range(3)] for g in range(4)]
    assert [s.reward for s in result.samples[2]] == [1.0, 0.0, 0.0]
    assert result.metrics == {
        "rollout/drawn_groups": 4,
        "rollout/surplus_groups": 0,
        "rollout/aborted_groups": 0,
        "rollout/dropped_samples": 0,
    }
    assert data.buffer == []


def test_filter_fills_the_batch_and_gives_the_surplus_back() -> None:
    data = source()
    executor = RolloutExecutor(
        generate=instantly,
        score=reward_of_label,
        dynamic_filter=check_reward_nonzero_std,
        over_sampling_batch_size=5,
    )
    first = run(executor, data, 4)
    # Drawn 0-4, 5-9; even ones pass: 0, 2, 4, 6; 7, 8, 9 are surplus.
    assert group_ids(first.samples) == [0, 2, 4, 6]
    assert first.metrics["rollout/dynamic_filter/drop_zero_std_1"] == 3
    assert first.metrics["rollout/surplus_groups"] == 3
    assert group_ids(first.rejected) == [1, 3, 5]
    assert group_ids(first.all_samples()) == list(range(7))
    assert group_ids(data.buffer) == [7, 8, 9]
    for sample in (s for group in data.buffer for s in group):
        assert sample == BaseSample(
            index=sample.index,
            group_index=sample.group_index,
            prompt=f"p{sample.group_index}",
            label=sample.group_index,
            metadata={"row": sample.group_index},
        )
    second = run(executor, data, 4)
    assert group_ids(second.samples) == [8, 10, 12, 14]


def test_without_over_sampling_only_what_is_missing_is_drawn() -> None:
    data = source()
    executor = RolloutExecutor(generate=instantly, score=reward_of_label, dynamic_filter=check_reward_nonzero_std)
    result = run(executor, data, 4)
    assert group_ids(result.samples) == [0, 2, 4, 6]
    assert result.metrics["rollout/drawn_groups"] == 7
    assert result.metrics["rollout/surplus_groups"] == 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    over=st.none() | st.integers(1, 9),
    in_flight=st.none() | st.integers(1, 20),
    granularity=st.sampled_from(["group", "sample"]),
)
def test_the_batch_never_depends_on_timing_and_nothing_is_lost(
    seed: int, over: int | None, in_flight: int | None, granularity: Any
) -> None:
    """Three rollouts with random delays against the same three without any."""

    def rollouts(generate: Any, **options: Any) -> tuple[list[Any], Source]:
        data = source()
        executor = RolloutExecutor(
            generate=generate,
            score=reward_of_label,
            dynamic_filter=check_reward_nonzero_std,
            over_sampling_batch_size=over,
            **options,
        )
        return [run(executor, data, 3) for _ in range(3)], data

    rng = random.Random(seed)
    delayed = generate_after(lambda sample: rng.randrange(12))
    plain, plain_data = rollouts(instantly)
    timed, timed_data = rollouts(delayed, max_in_flight=in_flight, granularity=granularity)
    for a, b in zip(plain, timed, strict=True):
        assert a.samples == b.samples
        assert a.rejected == b.rejected
        assert a.metrics == b.metrics
    assert plain_data.state_dict() == timed_data.state_dict()
    seen = [s.index for result in timed for group in result.samples + result.rejected for s in group]
    seen += [s.index for group in timed_data.buffer for s in group]
    assert sorted(seen) == list(range(timed_data.next_index))


def test_scoring_starts_when_a_generation_ends() -> None:
    """The first sample is scored while the others still generate; with a group reward, not before all are there."""
    events: list[str] = []

    async def generate(sample: BaseSample) -> BaseSample:
        for _ in range(10 * sample.index):
            await asyncio.sleep(0)
        events.append(f"generated {sample.index}")
        return sample

    async def score(sample: BaseSample) -> float:
        events.append(f"scored {sample.index}")
        return 1.0

    async def score_group(samples: list[BaseSample]) -> list[float]:
        events.append("scored all")
        return [float(sample.index) for sample in samples]

    run(RolloutExecutor(generate=generate, score=score), source(), 1)
    assert events == [f"{what} {i}" for i in range(N) for what in ("generated", "scored")]
    events.clear()
    result = run(RolloutExecutor(generate=generate, score_group=score_group), source(), 1)
    assert events == ["generated 0", "generated 1", "generated 2", "scored all"]
    assert [s.reward for s in result.samples[0]] == [0.0, 1.0, 2.0]


def test_generate_and_score_are_timed_apart() -> None:
    async def generate(sample: BaseSample) -> BaseSample:
        await asyncio.sleep(0.05)
        return sample

    async def score(sample: BaseSample) -> float:
        await asyncio.sleep(0.15)
        return 0.0

    result = run(RolloutExecutor(generate=generate, score=score), source(), 2)
    assert 0.05 <= result.generate_seconds < 0.12
    assert 0.14 <= result.score_seconds < 0.3


@pytest.mark.parametrize(("granularity", "most_groups"), [("group", 2), ("sample", 4)])
def test_granularity_decides_what_frees_room(granularity: Any, most_groups: int) -> None:
    """Room for two groups of three; the last sample of each group never ends until four groups have started."""
    started: set[int] = set()
    in_flight = 0
    most = 0

    async def generate(sample: BaseSample) -> BaseSample:
        nonlocal in_flight, most
        started.add(sample.group_index)
        in_flight += 1
        most = max(most, in_flight)
        if sample.index % N == N - 1:
            for _ in range(100):
                await asyncio.sleep(0)
            reached.append(len(started))
        in_flight -= 1
        return sample

    reached: list[int] = []
    executor = RolloutExecutor(generate=generate, score=reward_of_label, max_in_flight=6, granularity=granularity)
    result = run(executor, source(), 4)
    assert reached[0] == most_groups
    assert most <= 6
    assert group_ids(result.samples) == [0, 1, 2, 3]


def test_a_reward_that_is_there_already_is_kept() -> None:
    async def generate(sample: BaseSample) -> BaseSample:
        sample.reward = 0.0
        return sample

    async def score(sample: BaseSample) -> float:
        raise AssertionError("scored twice")

    result = run(RolloutExecutor(generate=generate, score=score), source(), 1)
    assert [s.reward for s in result.samples[0]] == [0.0, 0.0, 0.0]


def failing_reward(bad: dict[int, Any]) -> Callable[[BaseSample], Awaitable[Any]]:
    async def score(sample: BaseSample) -> Any:
        value = bad.get(sample.index, float(sample.index))
        if isinstance(value, Exception):
            raise value
        return value

    return score


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, "it is nan, not a finite number"),
        (-math.inf, "it is -inf"),
        (None, "it is None"),
        ("high", "not a finite|could not convert"),
        ([1.0], "not a number"),
        ({"accuracy": 1.0}, r"no key 'score', only \['accuracy'\]"),
        ({"score": math.nan}, "it is nan"),
        (KeyError("answer"), "KeyError: 'answer'"),
    ],
)
def test_a_bad_reward_stops_the_run_and_names_its_sample(value: Any, expected: str) -> None:
    data = source()
    with pytest.raises(RolloutError, match=expected) as caught:
        run(RolloutExecutor(generate=instantly, score=failing_reward({4: value})), data, 3)
    assert "sample 4 (group 1, prompt 'p1')" in str(caught.value)
    assert "--on-reward-error drop" in str(caught.value)
    assert group_ids(data.buffer) == [0, 1, 2]
    assert all(s.reward is None and s.metadata == {"row": s.label} for group in data.buffer for s in group)


def test_good_kinds_of_rewards() -> None:
    import numpy as np

    values = {0: 0, 1: True, 2: np.float32(0.5), 3: {"score": 0.0, "pred": None}, 4: -1.5, 5: np.int64(2)}
    result = run(RolloutExecutor(generate=instantly, score=failing_reward(values)), source(), 2)
    rewards = [s.reward for group in result.samples for s in group]
    assert rewards == [0.0, 1.0, 0.5, {"score": 0.0, "pred": None}, -1.5, 2.0]
    assert [type(r) for r in rewards] == [float, float, float, dict, float, float]


def test_dropped_samples_are_counted_and_the_others_stay() -> None:
    executor = RolloutExecutor(
        generate=instantly,
        score=failing_reward({4: math.nan, 6: KeyError("x"), 7: None, 8: math.inf}),
        on_reward_error="drop",
    )
    result = run(executor, source(), 3)
    # Group 2 has nothing left and is replaced by group 3.
    assert [[s.index for s in g] for g in result.samples] == [[0, 1, 2], [3, 5], [9, 10, 11]]
    assert result.metrics["rollout/dropped_samples"] == 4
    assert result.metrics["rollout/unscored_groups"] == 1
    assert group_ids(result.rejected) == [2]


def test_drop_with_a_group_reward() -> None:
    async def score_group(samples: list[BaseSample]) -> list[float]:
        if samples[0].group_index == 0:
            return [1.0, math.nan, 3.0]
        if samples[0].group_index == 1:
            raise OSError("away")
        return [1.0, 2.0]

    executor = RolloutExecutor(generate=instantly, score_group=score_group, on_reward_error="drop")
    with pytest.raises(RolloutError, match=r"groups in a row were rejected .*the reward gave 2 results for 3 samples"):
        run(executor, source(), 2)
    with pytest.raises(RolloutError, match=r"reward of sample 1 \(group 0, prompt 'p0'\) failed: it is nan"):
        run(RolloutExecutor(generate=instantly, score_group=score_group), source(), 1)


def test_a_filter_that_rejects_everything_says_so() -> None:
    def reject(args: Any, samples: list[BaseSample], **kwargs: Any) -> FilterOutput:
        return FilterOutput(False, "too_easy")

    data = source()
    executor = RolloutExecutor(generate=instantly, score=reward_of_label, dynamic_filter=reject, max_rejected_rounds=5)
    with pytest.raises(RolloutError, match=r"20 groups in a row were rejected \(20 drop_too_easy\) and none kept"):
        run(executor, data, 4)
    assert data.next_group_index == 20
    assert group_ids(data.buffer) == list(range(20))


def test_filters_may_answer_a_bool_and_nothing_else() -> None:
    def executor(answer: Any) -> RolloutExecutor[BaseSample]:
        return RolloutExecutor(
            generate=instantly, score=reward_of_label, dynamic_filter=lambda args, samples: answer(samples)
        )

    result = run(executor(lambda samples: samples[0].label > 1), source(), 2)
    assert group_ids(result.samples) == [2, 3]
    assert result.metrics["rollout/dynamic_filter/drop_rejected"] == 2
    with pytest.raises(RolloutError, match=r"group of sample 0 .*returned 'yes', not FilterOutput"):
        run(executor(lambda samples: "yes"), source(), 2)


def test_filter_looks_at_the_raw_reward_exactly() -> None:
    """Three times 0.9 has no spread, although 0.9 minus the rounded mean need not be 0; dict rewards by their key."""

    def group(*rewards: Any) -> list[BaseSample]:
        return [BaseSample(index=i, reward=reward) for i, reward in enumerate(rewards)]

    assert not check_reward_nonzero_std(None, group(0.9, 0.9, 0.9)).keep
    assert check_reward_nonzero_std(None, group(0.9, 0.9, 0.8999999)).keep
    assert check_reward_nonzero_std(None, group(0.0, 0.0, 0.0)).reason == "zero_std_0"
    assert check_reward_nonzero_std(None, group({"score": 1, "acc": 0}, {"score": -1, "acc": 0})).keep

    class Args:
        reward_key = "acc"

    assert not check_reward_nonzero_std(Args(), group({"score": 1, "acc": 0}, {"score": -1, "acc": 0})).keep


def test_a_failed_generation_names_its_sample_and_loses_no_prompt() -> None:
    async def generate(sample: BaseSample) -> BaseSample:
        await asyncio.sleep(0)
        if sample.index == 5:
            raise ConnectionError("engine gone")
        await asyncio.sleep(3600)
        return sample

    data = source()
    started = time.perf_counter()
    with pytest.raises(RolloutError, match=r"generating sample 5 \(group 1, prompt 'p1'\) failed: ConnectionError"):
        run(RolloutExecutor(generate=generate, score=reward_of_label), data, 4)
    assert time.perf_counter() - started < 5
    assert group_ids(data.buffer) == [0, 1, 2, 3]


def test_a_dead_engine_is_not_blamed_on_the_sample_that_waited() -> None:
    async def generate(sample: BaseSample) -> BaseSample:
        raise WorkerDied("engine", 1, 4711, "killed by SIGKILL")

    with pytest.raises(WorkerDied, match=r"^engine worker 1 \(pid 4711\) died"):
        run(RolloutExecutor(generate=generate, score=reward_of_label), source(), 1)


def test_an_aborted_group_goes_back_and_is_replaced() -> None:
    async def generate(sample: BaseSample) -> BaseSample:
        if sample.index == 1:
            raise asyncio.CancelledError
        if sample.index == 3:
            sample.status = Status.ABORTED
        return sample

    data = source()
    result = run(RolloutExecutor(generate=generate, score=reward_of_label), data, 2)
    assert group_ids(result.samples) == [2, 3]
    assert result.metrics["rollout/aborted_groups"] == 2
    assert group_ids(data.buffer) == [0, 1]
    assert all(sample.status is Status.PENDING for group in data.buffer for sample in group)


def test_cancelling_the_rollout_gives_everything_back() -> None:
    async def main() -> None:
        executor = RolloutExecutor(generate=generate_after(lambda sample: 10**9), score=reward_of_label)
        task = asyncio.create_task(executor.run(data, 4))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert asyncio.all_tasks() == {asyncio.current_task()}

    data = source()
    asyncio.run(main())
    assert group_ids(data.buffer) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (lambda sample: [sample, sample], "gave 2 results: a generate function returns one sample"),
        (lambda sample: None, "gave NoneType, expected the sample"),
        (lambda sample: BaseSample(index=sample.index + 100), "generating sample 0 gave sample 100"),
    ],
)
def test_generate_functions_must_return_their_sample(result: Any, expected: str) -> None:
    async def generate(sample: BaseSample) -> Any:
        return result(sample)

    with pytest.raises(RolloutError, match=expected):
        run(RolloutExecutor(generate=generate, score=reward_of_label), source(), 1)


def test_sources_that_run_out_or_repeat_themselves() -> None:
    executor = RolloutExecutor(generate=instantly, score=reward_of_label)
    with pytest.raises(RolloutError, match="no more groups: 2 of 3"):
        run(executor, FixedSource(source().get_samples(2)), 3)
    groups = source().get_samples(1)
    with pytest.raises(RolloutError, match="gave sample 0 twice"):
        run(executor, FixedSource(groups + groups), 2)
    with pytest.raises(RolloutError, match="a group without samples"):
        run(executor, FixedSource([[]]), 1)
