"""Smaller parts of the rollout: reward numbers, blocking work in threads, recordings' serialisation."""

from __future__ import annotations

import asyncio
import itertools
import threading
from typing import Any

import pytest

from shared_runtime.rollout.metrics import pass_rates, reward_metrics
from shared_runtime.rollout.threads import ThreadBatcher, call_each
from shared_runtime.sample import BaseSample


def test_pass_rates_against_counting_subsets() -> None:
    groups = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.5], [1.0, 1.0, 1.0, 2.0]]
    for k, value in pass_rates(groups).items():
        subsets = [any(r >= 1 for r in subset) for g in groups for subset in itertools.combinations(g, k)]
        assert value == pytest.approx(sum(subsets) / len(subsets))
    assert list(pass_rates(groups)) == [1, 2, 4]
    assert list(pass_rates([[1.0] * 3, [0.0] * 9])) == [1, 2]
    assert pass_rates([]) == {}


def test_reward_metrics() -> None:
    def group(*rewards: Any) -> list[BaseSample]:
        return [BaseSample(reward=reward) for reward in rewards]

    metrics = reward_metrics([group(0.9, 0.9), group(0.0, 1.0), group(-1.0)])
    assert metrics["rollout/raw_reward"] == pytest.approx(1.8 / 5)
    assert metrics["rollout/zero_std_groups"] == pytest.approx(2 / 3)
    entries = reward_metrics([group({"score": 1.0, "acc": 1, "pred": "7"}, {"score": -1.0, "acc": 0, "pred": None})])
    assert entries["rollout/raw_reward"] == 0.0
    assert entries["rollout/reward/acc_mean"] == 0.5
    assert "rollout/reward/pred_mean" not in entries
    assert reward_metrics([]) == {}


def test_thread_batcher_gives_each_its_own() -> None:
    batches: list[int] = []

    def work(items: list[int]) -> list[Any]:
        assert threading.current_thread() is not threading.main_thread()
        batches.append(len(items))
        return call_each(lambda item: 10 // item, items)

    async def main() -> list[Any]:
        batcher: ThreadBatcher[int, int] = ThreadBatcher(work)
        results = await asyncio.gather(*(batcher.submit(i) for i in (1, 0, 5)), return_exceptions=True)
        batcher.close()
        return results

    one, error, five = asyncio.run(main())
    assert (one, five) == (10, 2)
    assert isinstance(error, ZeroDivisionError)
    assert batches == [3]


def test_thread_batcher_passes_on_what_the_function_raises() -> None:
    async def main(function: Any) -> list[Any]:
        batcher: ThreadBatcher[int, int] = ThreadBatcher(function)
        results = await asyncio.gather(*(batcher.submit(i) for i in range(2)), return_exceptions=True)
        batcher.close()
        return results

    def broken(items: list[int]) -> list[Any]:
        raise OSError("disk")

    assert [type(r) for r in asyncio.run(main(broken))] == [OSError, OSError]
    assert [str(r) for r in asyncio.run(main(lambda items: [1]))] == ["1 results for 2 items"] * 2
