"""Timers against hand-made timelines of a fake clock."""

from __future__ import annotations

import asyncio

import pytest

from shared_runtime.tracking import Timers


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_step_of_known_parts(clock):
    timers = Timers(clock=clock)
    with timers("rollout"):
        clock.now += 4
    clock.now += 1
    with timers("actor_train"):
        clock.now += 5
    assert timers.pop() == pytest.approx(
        {"perf/rollout_time": 4, "perf/actor_train_time": 5, "perf/step_time": 10, "perf/overhead": 0.1}
    )
    clock.now += 2
    assert timers.pop() == {"perf/step_time": 2, "perf/overhead": 1.0}


def test_nested_and_overlapping_blocks_count_once(clock):
    timers = Timers(clock=clock)
    rollout, first, second = timers("rollout"), timers("reward"), timers("reward")
    rollout.__enter__()
    clock.now += 1
    first.__enter__()
    clock.now += 2
    second.__enter__()
    clock.now += 3
    first.__exit__(None, None, None)
    clock.now += 4
    second.__exit__(None, None, None)
    rollout.__exit__(None, None, None)
    clock.now += 10
    assert timers.pop() == pytest.approx(
        {"perf/rollout_time": 10, "perf/reward_time": 9, "perf/step_time": 20, "perf/overhead": 0.5}
    )


def test_names_that_are_not_work_are_overhead(clock):
    timers = Timers(clock=clock)
    with timers("save"):
        clock.now += 1
    with timers("eval"):
        clock.now += 3
    assert timers.pop() == pytest.approx(
        {"perf/save_time": 1, "perf/eval_time": 3, "perf/step_time": 4, "perf/overhead": 0.25}
    )


def test_block_open_over_a_step_is_split(clock):
    timers = Timers(clock=clock)
    with timers("rollout"):
        clock.now += 1
        assert timers.pop()["perf/rollout_time"] == 1
        clock.now += 2
    assert timers.pop() == {"perf/rollout_time": 2, "perf/step_time": 2, "perf/overhead": 0.0}


def test_block_that_raises_is_counted(clock):
    timers = Timers(clock=clock)

    def work() -> None:
        with timers("rollout"):
            clock.now += 1
            raise ValueError("no rollout")

    with pytest.raises(ValueError, match="no rollout"):
        work()
    assert timers.pop()["perf/rollout_time"] == 1


def test_start_step_forgets_what_was_before(clock):
    timers = Timers(clock=clock)
    with timers("rollout"):
        clock.now += 1
    timers.start_step()
    clock.now += 1
    assert timers.pop() == {"perf/step_time": 1, "perf/overhead": 1.0}


def test_seconds_measured_elsewhere(clock):
    timers = Timers(clock=clock)
    with timers("actor_train"):
        clock.now += 4
    timers.add("log_probs", 1.5)
    metrics = timers.pop()
    assert metrics["perf/log_probs_time"] == 1.5
    assert metrics["perf/overhead"] == 0.0


def test_phases_are_told_as_they_change(clock):
    phases = []
    timers = Timers(on_change=phases.append, clock=clock)
    with timers("rollout"), timers("reward"), timers("reward"):
        pass
    assert phases == ["rollout", "reward", "rollout", None]


def test_concurrent_tasks_never_exceed_wall_time():
    timers = Timers()

    async def score() -> None:
        with timers("reward"):
            await asyncio.sleep(0.02)

    async def main() -> None:
        await asyncio.gather(*(score() for _ in range(20)))

    asyncio.run(main())
    metrics = timers.pop()
    assert 0.02 <= metrics["perf/reward_time"] <= metrics["perf/step_time"]
