"""Rewards in every form that a user may write, and the built-in graders in batches."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from llm_rl.sample import Sample
from llm_rl.scoring import RewardScorer, reward_request
from rewards import LabelError, RewardServiceError, UnknownRewardError


def sample(index: int, response: str = "", label: Any = None, **metadata: Any) -> Sample:
    return Sample(index=index, response=response, label=label, metadata=metadata, prompt="q")


def scores(scorer: RewardScorer, samples: list[Sample]) -> list[Any]:
    async def main() -> list[Any]:
        assert scorer.score is not None
        return await asyncio.gather(*(scorer.score(s) for s in samples), return_exceptions=True)

    try:
        return asyncio.run(main())
    finally:
        scorer.close()


def test_built_in_rewards_mixed_and_in_order() -> None:
    samples = [
        sample(0, r"\boxed{95}", "95"),
        sample(1, r"\boxed{96}", 95),
        sample(2, "the cat", "a cat", rm_type="f1"),
        sample(3, r"so \boxed{0}", 0),
    ]
    assert scores(RewardScorer(rm_type="math"), samples) == [1.0, 0.0, 1.0, 1.0]


def test_one_batch_for_all_that_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    import rewards.each as module

    sizes: list[tuple[int, bool]] = []
    real = module.score

    def counting(requests: Any, rm_type: Any, options: Any) -> Any:
        sizes.append((len(requests), threading.current_thread() is threading.main_thread()))
        return real(requests, rm_type, options=options)

    monkeypatch.setattr(module, "score", counting)
    samples = [sample(i, r"\boxed{1}", i % 2) for i in range(300)]
    assert scores(RewardScorer(rm_type="math"), samples) == [float(i % 2) for i in range(300)]
    assert sizes == [(300, False)]


def test_a_sample_that_cannot_be_scored_fails_alone() -> None:
    samples = [sample(0, r"\boxed{1}", "1"), sample(1, "x", None), sample(2, "x", "1", rm_type="no_such")]
    good, no_label, unknown = scores(RewardScorer(rm_type="math"), samples)
    assert good == 1.0
    assert isinstance(no_label, LabelError)
    assert isinstance(unknown, UnknownRewardError)


def service(monkeypatch: pytest.MonkeyPatch, bad: set[int]) -> list[int]:
    """A reward service that fails on some samples, as the client reports it."""
    import rewards.each as module

    calls: list[int] = []

    def fake(requests: Any, rm_type: Any, options: Any) -> list[float]:
        calls.append(len(requests))
        for request in requests:
            if request.sample_id in bad:
                raise RewardServiceError(f"sample {request.sample_id}: HTTP 500 from http://host/score")
        return [float(request.sample_id) for request in requests]

    monkeypatch.setattr(module, "score", fake)
    return calls


def test_service_error_is_that_of_its_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    service(monkeypatch, {3, 7})
    results = scores(RewardScorer(rm_type="remote_rm"), [sample(i) for i in range(10)])
    assert [r for r in results if not isinstance(r, Exception)] == [0.0, 1.0, 2.0, 4.0, 5.0, 6.0, 8.0, 9.0]
    assert [str(results[i])[:8] for i in (3, 7)] == ["sample 3", "sample 7"]


def test_service_that_is_down_is_not_asked_for_every_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = service(monkeypatch, set(range(100)))
    results = scores(RewardScorer(rm_type="remote_rm"), [sample(i) for i in range(100)])
    assert all(isinstance(r, RewardServiceError) for r in results)
    assert len(calls) == 4


def test_custom_rewards_async_and_ordinary() -> None:
    async def asynchronous(args: Any, sample: Sample) -> float:
        await asyncio.sleep(0)
        return args + sample.index

    busy = threading.Lock()

    def ordinary(args: Any, sample: Sample) -> float:
        assert busy.acquire(blocking=False), "called from two threads at once"
        time.sleep(0.001)
        busy.release()
        if sample.index == 2:
            raise KeyError("answer")
        return args + sample.index

    samples = [sample(i) for i in range(5)]
    assert scores(RewardScorer(custom=asynchronous, args=10), samples) == [10, 11, 12, 13, 14]
    results = scores(RewardScorer(custom=ordinary, args=10), samples)
    assert [r for r in results if not isinstance(r, Exception)] == [10, 11, 13, 14]
    assert isinstance(results[2], KeyError)


def test_an_ordinary_function_that_returns_a_coroutine() -> None:
    async def inner() -> float:
        return 1.0

    coroutines = []

    def wrapped(args: Any, sample: Sample) -> Any:
        coroutines.append(inner())
        return coroutines[-1]

    (result,) = scores(RewardScorer(custom=wrapped), [sample(0)])
    coroutines[0].close()
    assert isinstance(result, TypeError)
    assert "make it async def" in str(result)


def test_group_rewards() -> None:
    async def asynchronous(args: Any, samples: list[Sample]) -> list[float]:
        return [float(s.index) for s in samples]

    def ordinary(args: Any, samples: list[Sample]) -> list[float]:
        return [float(s.index) for s in samples]

    async def main(custom: Any) -> Any:
        scorer = RewardScorer(custom=custom, group_rm=True)
        assert scorer.score is None
        assert scorer.score_group is not None
        result = await scorer.score_group([sample(4), sample(5)])
        scorer.close()
        return result

    for custom in (asynchronous, ordinary):
        assert asyncio.run(main(custom)) == [4.0, 5.0]


def test_what_a_reward_gets_to_read() -> None:
    chat = Sample(
        index=7,
        prompt=[
            {"role": "user", "content": "first"},
            {"role": "assistant", "content": "x"},
            {"role": "user", "content": "q"},
        ],
        response="r",
        label=0,
        tokens=[1, 2],
        metadata={"rm_type": "f1"},
    )
    request = reward_request(chat)
    assert (request.prompt, request.response, request.label, request.sample_id) == ("q", "r", 0, 7)
    assert (list(request.tokens or ()), request.metadata) == ([1, 2], {"rm_type": "f1"})
