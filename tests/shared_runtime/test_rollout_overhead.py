"""What scheduling a rollout costs the driver when generation and rewards cost nothing."""

from __future__ import annotations

import asyncio
import time

from shared_runtime.data import PromptDataset, PromptRow, RolloutDataSource
from shared_runtime.engines.client import BatchingClient
from shared_runtime.placement.groups import InProcessGroup
from shared_runtime.rollout.coalesce import Coalescer, set_results
from shared_runtime.rollout.event_loop import EventLoop
from shared_runtime.rollout.executor import RolloutExecutor
from shared_runtime.sample import BaseSample


class InstantEngine:
    """Answers at once."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def generate(self, requests: list[int]) -> list[int]:
        self.batches.append(len(requests))
        return requests


def test_512_samples_are_scheduled_in_milliseconds() -> None:
    """About 10 ms of this thread's time on a small machine; the bound leaves room for a slower one."""
    rows = [PromptRow(f"{i}+1=", i) for i in range(1000)]
    data: RolloutDataSource[BaseSample] = RolloutDataSource(
        PromptDataset(rows), BaseSample, n_samples_per_prompt=16, shuffle=True
    )
    engine = InstantEngine()
    client: BatchingClient[int, int] = BatchingClient(InProcessGroup(engine))
    scores: Coalescer[BaseSample, float] = Coalescer(lambda items, out: set_results(out, [0.0] * len(items)))

    async def generate(sample: BaseSample) -> BaseSample:
        await client.generate(sample.index)
        return sample

    async def score(sample: BaseSample) -> float:
        return await scores.submit(sample)

    executor = RolloutExecutor(generate=generate, score=score)
    times = []
    with EventLoop() as loop:
        for _ in range(10):
            started = time.thread_time()
            result = loop.run(executor.run(data, 32))
            times.append(time.thread_time() - started)
            assert len(result.samples) == 32
    assert engine.batches == [512] * 10
    assert min(times) < 0.04


def test_event_loop_inside_a_running_loop() -> None:
    """A notebook already runs a loop in its thread."""

    async def rollout() -> int:
        await asyncio.sleep(0)
        return 3

    async def cell() -> tuple[int, int]:
        with EventLoop() as loop:
            return loop.run(rollout()), loop.run(rollout())

    assert asyncio.run(cell()) == (3, 3)
    with EventLoop() as loop:
        assert [loop.run(rollout()), loop.run(rollout())] == [3, 3]
