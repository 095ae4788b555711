"""Microgroups: what is generated in one call, and scored while others are still generated.

Generation and rewards are stand-ins here, so that one can be made to wait for the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shared_runtime.rollout.executor import FixedSource, RolloutExecutor
from shared_runtime.rollout.scoring import SampleScorer
from shared_runtime.rollout.types import RolloutResult
from shared_runtime.sample import BaseSample

N = 3


def source(num_groups: int = 2) -> FixedSource[BaseSample]:
    return FixedSource([[BaseSample(index=g * N + k, group_index=g) for k in range(N)] for g in range(num_groups)])


async def reward_of_index(sample: BaseSample) -> float:
    return float(sample.index)


def run(executor: RolloutExecutor[BaseSample], data: Any, num_groups: int) -> RolloutResult[BaseSample]:
    return asyncio.run(executor.run(data, num_groups))


@pytest.mark.parametrize(
    ("size", "calls"), [(None, [[0, 1, 2], [3, 4, 5]]), (2, [[0, 1], [2], [3, 4], [5]]), (1, [[i] for i in range(6)])]
)
def test_generation_of_microgroups(size: int | None, calls: list[list[int]]) -> None:
    seen: list[list[int]] = []

    async def generate(group: list[BaseSample], part: range) -> list[BaseSample]:
        assert [sample.index % N for sample in group] == [0, 1, 2]
        seen.append([group[position].index for position in part])
        return [group[position] for position in part]

    executor = RolloutExecutor(generate_microgroup=generate, microgroup_size=size, score=reward_of_index)
    result = run(executor, source(), 2)
    assert seen == calls
    assert [s.reward for group in result.samples for s in group] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def microgroups_of_one(order: list[str], last: asyncio.Event) -> Callable[..., Awaitable[list[BaseSample]]]:
    """The last member of the only group is generated when `last` is set, the others at once."""

    async def generate(group: list[BaseSample], part: range) -> list[BaseSample]:
        if part[0] == N - 1:
            await asyncio.wait_for(last.wait(), 5)
        order.append(f"generated {part[0]}")
        return [group[part[0]]]

    return generate


@pytest.mark.parametrize("way", ["score", "score_microgroup"])
def test_a_microgroup_is_scored_while_others_of_its_group_are_generated(way: str) -> None:
    """The last one is not generated before the others have been scored: waiting for the group would never end."""
    order: list[str] = []

    async def main() -> RolloutResult[BaseSample]:
        last = asyncio.Event()

        async def score(sample: BaseSample) -> float:
            order.append(f"scored {sample.index}")
            if order.count("scored 0") and order.count("scored 1"):
                last.set()
            return float(sample.index)

        async def score_microgroup(samples: list[BaseSample]) -> list[float]:
            return [await score(sample) for sample in samples]

        chosen: dict[str, Any] = {way: score if way == "score" else score_microgroup}
        executor = RolloutExecutor(generate_microgroup=microgroups_of_one(order, last), microgroup_size=1, **chosen)
        return await executor.run(source(), 1)

    result = asyncio.run(main())
    assert order[-2:] == ["generated 2", "scored 2"]
    assert [sample.reward for sample in result.samples[0]] == [0.0, 1.0, 2.0]


def test_a_group_reward_waits_for_the_whole_group() -> None:
    order: list[str] = []

    async def main() -> RolloutResult[BaseSample]:
        last = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, last.set)

        async def score_group(samples: list[BaseSample]) -> list[float]:
            order.append(f"scored {len(samples)}")
            return [float(sample.index) for sample in samples]

        generate = microgroups_of_one(order, last)
        return await RolloutExecutor(generate_microgroup=generate, microgroup_size=1, score_group=score_group).run(
            source(), 1
        )

    result = asyncio.run(main())
    assert order == ["generated 0", "generated 1", "generated 2", "scored 3"]
    assert [sample.reward for sample in result.samples[0]] == [0.0, 1.0, 2.0]


def test_a_slow_reward_does_not_hold_up_generation() -> None:
    """An engine that draws one microgroup after the other, and a reward as slow as it is, that sleeps in a thread."""
    seconds, microgroups = 0.03, 12

    async def main() -> RolloutResult[BaseSample]:
        engine = asyncio.Lock()

        async def generate(group: list[BaseSample], part: range) -> list[BaseSample]:
            async with engine:
                await asyncio.sleep(seconds)
            return [group[position] for position in part]

        def slow(samples: list[BaseSample]) -> list[Any]:
            time.sleep(seconds)
            return [1.0] * len(samples)

        scorer: SampleScorer[BaseSample] = SampleScorer(built_in=slow, max_workers=1)
        try:
            executor = RolloutExecutor(generate_microgroup=generate, microgroup_size=1, score=scorer.score)
            return await executor.run(source(microgroups // N), microgroups // N)
        finally:
            scorer.close()

    result = asyncio.run(main())
    total = result.generate_seconds + result.score_seconds
    assert total < 1.5 * microgroups * seconds  # one behind the other they would take twice that
    assert result.scoring_seconds > 0.9 * microgroups * seconds
    assert result.scoring_overlap > 0.75
