"""Takes groups through generation and scoring, one task a sample or microgroup, and scores what has just ended."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, Literal, TypeVar

from shared_runtime.placement.failures import WorkerDied
from shared_runtime.rollout.submission import SubmissionScheduler
from shared_runtime.rollout.types import RolloutError, name_sample
from shared_runtime.sample import BaseSample, Status

S = TypeVar("S", bound=BaseSample)
Reward = float | dict[str, Any]
OnRewardError = Literal["raise", "drop"]

# Errors that name what they are about, which need not be the sample that was waiting for the engine.
_SPEAKS_FOR_ITSELF = (RolloutError, WorkerDied)


class Group(Generic[S]):
    """A group on its way."""

    __slots__ = ("done", "generating", "last_error", "pending", "samples", "size", "unscored", "unstarted")

    def __init__(self, samples: list[S]) -> None:
        self.size = len(samples)
        self.samples = list(samples)
        self.unstarted = [_fields(sample) for sample in samples]
        self.generating = self.pending = len(samples)
        self.unscored: set[int] = set()
        self.last_error: str | None = None
        self.done = False

    def members(self) -> list[S]:
        """The samples that have a reward, ordered by index."""
        kept = [sample for i, sample in enumerate(self.samples) if i not in self.unscored]
        return sorted(kept, key=lambda sample: sample.index)

    def as_drawn(self) -> list[S]:
        """The group as the data source gave it: prompts that nothing was generated for."""
        return [_restore(type(sample), fields) for sample, fields in zip(self.samples, self.unstarted, strict=True)]


class Stopwatch:
    """Adds up the wall time during which at least one `with` block is open."""

    __slots__ = ("_open", "_since", "seconds")

    def __init__(self) -> None:
        self.seconds, self._open, self._since = 0.0, 0, 0.0

    def __enter__(self) -> None:
        if self._open == 0:
            self._since = time.perf_counter()
        self._open += 1

    def __exit__(self, *error: object) -> None:
        self._open -= 1
        if self._open == 0:
            self.seconds += time.perf_counter() - self._since


class GroupRunner(Generic[S]):
    """Runs the tasks of all groups in flight.

    The first failure is kept in `failure`; `wake` is set whenever a group is done, room has come free or a failure
    came up. `last_generated` is the clock when the last generation ended, `scoring` the time spent with rewards.
    """

    def __init__(
        self,
        *,
        generate: Callable[[S], Awaitable[S]] | None,
        generate_microgroup: Callable[[list[S], range], Awaitable[list[S]]] | None,
        microgroup_size: int | None,
        score: Callable[[S], Awaitable[Reward]] | None,
        score_microgroup: Callable[[list[S]], Awaitable[list[Reward]]] | None,
        score_group: Callable[[list[S]], Awaitable[list[Reward]]] | None,
        scheduler: SubmissionScheduler,
        on_reward_error: OnRewardError,
        reward_key: str | None,
    ) -> None:
        self.generate = generate
        self.generate_microgroup = generate_microgroup
        self.microgroup_size = microgroup_size
        self.score = score
        self.score_microgroup = score_microgroup
        self.score_group = score_group
        self.scheduler = scheduler
        self.on_reward_error = on_reward_error
        self.reward_key = reward_key
        self.wake = asyncio.Event()
        self.failure: BaseException | None = None
        self.last_generated = time.perf_counter()
        self.scoring = Stopwatch()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, group: Group[S]) -> None:
        """Submit a group."""
        self.scheduler.submitted(group.size)
        if self.generate_microgroup is None:
            for position in range(group.size):
                self._spawn(self._run_sample(group, position))
            return
        size = self.microgroup_size or group.size
        for first in range(0, group.size, size):
            self._spawn(self._run_microgroup(group, range(first, min(first + size, group.size))))

    async def stop(self) -> None:
        """Cancel what is still running and wait until it is gone."""
        tasks = [task for task in self._tasks if not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and self.failure is None:
            self.failure = task.exception()
            self.wake.set()

    async def _run_sample(self, group: Group[S], position: int) -> None:
        drawn = group.samples[position]
        assert self.generate is not None
        try:
            result = await self.generate(drawn)
        except asyncio.CancelledError:
            if _cancelled_from_outside():
                raise
            drawn.status = Status.ABORTED
            result = drawn
        except _SPEAKS_FOR_ITSELF:
            raise
        except Exception as error:
            raise RolloutError(f"generating {name_sample(drawn)} failed: {type(error).__name__}: {error}") from error
        _check_result(result, drawn, group.unstarted[position]["index"])
        group.samples[position] = result
        self._generated(group, 1)
        await self._score_generated(group, range(position, position + 1))

    async def _run_microgroup(self, group: Group[S], part: range) -> None:
        drawn = [group.samples[position] for position in part]
        assert self.generate_microgroup is not None
        try:
            results = await self.generate_microgroup(list(group.samples), part)
        except asyncio.CancelledError:
            if _cancelled_from_outside():
                raise
            results = drawn
            for sample in drawn:
                sample.status = Status.ABORTED
        except _SPEAKS_FOR_ITSELF:
            raise
        except Exception as error:
            first = name_sample(drawn[0])
            raise RolloutError(f"generating from {first} on failed: {type(error).__name__}: {error}") from error
        if not isinstance(results, list) or len(results) != len(part):
            raise RolloutError(
                f"generating from {name_sample(drawn[0])} on gave {_amount(results)}, not {len(part)} samples"
            )
        for position, result, sample in zip(part, results, drawn, strict=True):
            _check_result(result, sample, group.unstarted[position]["index"])
            group.samples[position] = result
        self._generated(group, len(part))
        await self._score_generated(group, part)

    def _generated(self, group: Group[S], count: int) -> None:
        self.last_generated = time.perf_counter()
        group.generating -= count
        for _ in range(count):
            self.scheduler.sample_done()
        if group.generating == 0:
            self.scheduler.group_done(group.size)
        if self.scheduler.max_in_flight is not None:
            self.wake.set()

    async def _score_generated(self, group: Group[S], part: range) -> None:
        """Score what a generation gave: sample by sample, together, or with its whole group once all of it is there."""
        if self.score_group is not None:
            if group.generating == 0:
                await self._score_together(group, range(group.size), self.score_group)
        elif self.score_microgroup is not None:
            await self._score_together(group, part, self.score_microgroup)
        elif len(part) == 1:
            await self._score_sample(group, part[0])
        else:
            for position in part:
                self._spawn(self._score_sample(group, position))

    async def _score_sample(self, group: Group[S], position: int) -> None:
        """Score one sample, unless its generate function already did or gave up."""
        sample = group.samples[position]
        if sample.status is not Status.ABORTED:
            try:
                if sample.reward is None and self.score is not None:
                    with self.scoring:
                        sample.reward = await self.score(sample)
                check_reward(sample, self.reward_key)
            except Exception as error:
                self._reward_failed(group, [position], error)
        self._scored(group, 1)

    async def _score_together(
        self, group: Group[S], part: range, score: Callable[[list[S]], Awaitable[list[Reward]]]
    ) -> None:
        """Score a microgroup, or with `--group-rm` a group, in one call."""
        samples = [group.samples[position] for position in part]
        if all(sample.status is not Status.ABORTED for sample in samples):
            try:
                if any(sample.reward is None for sample in samples):
                    with self.scoring:
                        rewards = await score(samples)
                    if not isinstance(rewards, list | tuple) or len(rewards) != len(samples):
                        raise TypeError(f"the reward gave {_amount(rewards)} for {len(samples)} samples")
                    for sample, reward in zip(samples, rewards, strict=True):
                        sample.reward = reward
            except Exception as error:
                self._reward_failed(group, list(part), error)
            else:
                for position, sample in zip(part, samples, strict=True):
                    try:
                        check_reward(sample, self.reward_key)
                    except ValueError as error:
                        self._reward_failed(group, [position], error)
        self._scored(group, len(part))

    def _reward_failed(self, group: Group[S], positions: list[int], error: Exception) -> None:
        sample = group.samples[positions[0]]
        what = name_sample(sample)
        if len(positions) > 1:
            what = f"the {len(positions)} samples from {what} on"
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        message = f"the reward of {what} failed: {kind}{error}"
        if self.on_reward_error == "raise":
            hint = "fix the reward, or drop and count such samples with --on-reward-error drop"
            raise RolloutError(f"{message}\n{hint}") from error
        group.unscored.update(positions)
        group.last_error = message

    def _scored(self, group: Group[S], count: int) -> None:
        group.pending -= count
        if group.pending == 0:
            group.done = True
            self.wake.set()


def check_reward(sample: BaseSample, key: str | None = None) -> None:
    """Check that a sample's reward is a finite number, or a dict whose trained entry is; numbers become `float`.

    Raises:
        ValueError: If it isn't.
    """
    reward = sample.reward
    if type(reward) is not float:
        if reward is None:
            raise ValueError("it is None")
        try:
            reward = sample.scalar_reward(key)
        except TypeError as error:
            raise ValueError(f"it is {sample.reward!r}, not a number or a dict of numbers") from error
        if not isinstance(sample.reward, dict):
            sample.reward = reward
    if not math.isfinite(reward):
        raise ValueError(f"it is {reward}, not a finite number")


def _cancelled_from_outside() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _check_result(result: Any, drawn: BaseSample, index: int) -> None:
    if isinstance(result, list):
        raise RolloutError(
            f"generating {name_sample(drawn)} gave {_amount(result)}: a generate function returns one sample; "
            "several training rows from one rollout are not supported yet"
        )
    if not isinstance(result, BaseSample):
        raise RolloutError(f"generating {name_sample(drawn)} gave {type(result).__name__}, expected the sample")
    if result.index != index:
        raise RolloutError(f"generating sample {index} gave sample {result.index}: a sample must keep its index")


def _amount(value: Any) -> str:
    return f"{len(value)} results" if isinstance(value, list | tuple) else type(value).__name__


def _fields(sample: BaseSample) -> dict[str, Any]:
    """A sample's fields, containers copied one level deep. Several times cheaper than `copy.copy`."""
    return {k: (v.copy() if type(v) in (list, dict) else v) for k, v in vars(sample).items()}


def _restore(cls: type[S], fields: dict[str, Any]) -> S:
    sample = object.__new__(cls)
    sample.__dict__.update(fields)
    return sample
