"""One synchronous rollout: draw groups, generate, score, filter, until the batch is full."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

from shared_runtime.rollout.filters import DynamicFilter, apply_filter
from shared_runtime.rollout.group_runner import Group, GroupRunner, OnRewardError, Reward
from shared_runtime.rollout.submission import Granularity, SubmissionScheduler
from shared_runtime.rollout.types import RolloutError, RolloutResult, name_sample
from shared_runtime.sample import BaseSample, Status

S = TypeVar("S", bound=BaseSample)
logger = logging.getLogger(__name__)


class GroupSource(Protocol[S]):
    """The part of a data source that a rollout uses."""

    def get_samples(self, num_samples: int) -> list[list[S]]: ...
    def add_samples(self, samples: list[list[S]]) -> None: ...


class RolloutExecutor(Generic[S]):
    """Fills a batch with groups that were generated, scored and kept.

    Groups are judged in the order in which they were drawn, whatever order they finish in: the batch is the first
    `num_groups` that pass, so a rollout gives the same batch whatever the timing. What was drawn beyond it goes back
    to the data source as unstarted prompts.

    With `on_reward_error="drop"` a sample whose reward fails leaves its group; filters and group statistics see the
    remaining members, and a group with none left is rejected and replaced.
    """

    def __init__(
        self,
        *,
        generate: Callable[[S], Awaitable[S]] | None = None,
        generate_microgroup: Callable[[list[S], range], Awaitable[list[S]]] | None = None,
        microgroup_size: int | None = None,
        score: Callable[[S], Awaitable[Reward]] | None = None,
        score_microgroup: Callable[[list[S]], Awaitable[list[Reward]]] | None = None,
        score_group: Callable[[list[S]], Awaitable[list[Reward]]] | None = None,
        dynamic_filter: DynamicFilter | None = None,
        args: Any = None,
        on_reward_error: OnRewardError = "raise",
        reward_key: str | None = None,
        over_sampling_batch_size: int | None = None,
        max_in_flight: int | None = None,
        granularity: Granularity = "group",
        max_rejected_rounds: int = 8,
        stop_when_exhausted: bool = False,
    ) -> None:
        """Set up.

        Args:
            generate: Generates one sample. Exactly one of this and `generate_microgroup` is given.
            generate_microgroup: `(group, positions)`: generates these members of a group in one call.
            microgroup_size: Members a call, fewer in the last one; by default the whole group.
            score: The reward of one sample, called as soon as it is generated. Not called for samples that already
                have one. At most one of the three; without any, generation must set the reward.
            score_microgroup: The rewards, in order, of what one call generated.
            score_group: The rewards of a whole group, in order (`--group-rm`).
            dynamic_filter: `(args, group) -> FilterOutput | bool`.
            args: Passed to the filter.
            on_reward_error: `raise` stops the run at a reward that raises or is not finite; `drop` counts it.
            reward_key: The entry of dict rewards that must be finite.
            over_sampling_batch_size: Groups drawn in a round; by default as many as are missing.
            max_in_flight: At most this many samples are generated at once; by default all.
            granularity: What frees room under `max_in_flight`.
            max_rejected_rounds: So many times `num_groups` rejected groups in a row stop the run.
            stop_when_exhausted: A source without more groups ends the batch early (evaluation sets).
        """
        if (generate is None) == (generate_microgroup is None):
            raise ValueError("give either generate or generate_microgroup")
        if sum(way is not None for way in (score, score_microgroup, score_group)) > 1:
            raise ValueError("give only one of score, score_microgroup and score_group")
        self._make_runner = lambda: GroupRunner(
            generate=generate,
            generate_microgroup=generate_microgroup,
            microgroup_size=microgroup_size,
            score=score,
            score_microgroup=score_microgroup,
            score_group=score_group,
            scheduler=SubmissionScheduler(max_in_flight, granularity),
            on_reward_error=on_reward_error,
            reward_key=reward_key,
        )
        self.dynamic_filter = dynamic_filter
        self.args = args
        self.over_sampling_batch_size = over_sampling_batch_size
        self.max_rejected_rounds = max_rejected_rounds
        self.stop_when_exhausted = stop_when_exhausted

    async def run(self, source: GroupSource[S], num_groups: int) -> RolloutResult[S]:
        """Fill one batch.

        Args:
            source: Where groups are drawn and given back.
            num_groups: Groups to keep (`--rollout-batch-size`).

        Raises:
            RolloutError: A generation or reward failed, the filter rejects everything, the source has run out, or it
                gave a sample twice. Every group that was drawn is back in the source then.
        """
        batch = _Batch(self, source, num_groups, self._make_runner())
        try:
            return await batch.fill()
        except BaseException:
            await batch.runner.stop()
            source.add_samples([group.as_drawn() for group in batch.drawn])
            raise


class _Batch(Generic[S]):
    """The state of one rollout."""

    def __init__(
        self, executor: RolloutExecutor[S], source: GroupSource[S], num_groups: int, runner: GroupRunner[S]
    ) -> None:
        self.executor = executor
        self.source = source
        self.num_groups = num_groups
        self.runner = runner
        self.drawn: list[Group[S]] = []
        self.waiting: deque[Group[S]] = deque()
        self.unjudged: deque[Group[S]] = deque()
        self.kept: list[list[S]] = []
        self.rejected: list[list[S]] = []
        self.aborted: list[Group[S]] = []
        self.reasons: Counter[str] = Counter()
        self.dropped_samples = 0
        self.rejected_in_a_row = 0
        self.last_error: str | None = None
        self._indices: set[int] = set()

    async def fill(self) -> RolloutResult[S]:
        started = time.perf_counter()
        while True:
            self.runner.wake.clear()
            if self.runner.failure is not None:
                raise self.runner.failure
            self._judge_finished()
            if len(self.kept) == self.num_groups:
                break
            if not self._draw_missing():
                break
            self._submit()
            await self.runner.wake.wait()
        ended = time.perf_counter()
        await self.runner.stop()
        surplus = list(self.unjudged)
        back = [*self.aborted, *surplus]
        if back:
            self.source.add_samples([group.as_drawn() for group in back])
        self._check_nothing_lost(len(surplus))
        generated = max(started, self.runner.last_generated)
        return RolloutResult(
            samples=sorted(self.kept, key=lambda group: group[0].group_index),
            metrics=self._metrics(len(surplus)),
            rejected=self.rejected,
            generate_seconds=generated - started,
            score_seconds=ended - generated,
            scoring_seconds=self.runner.scoring.seconds,
        )

    def _draw_missing(self) -> bool:
        """Draw until what is kept and what is under way fill the batch; `False` if that can't be and nothing is."""
        while (missing := self.num_groups - len(self.kept) - len(self.unjudged)) > 0:
            groups = self.source.get_samples(self.executor.over_sampling_batch_size or missing)
            if not groups:
                if self.unjudged:
                    return True
                if self.executor.stop_when_exhausted:
                    return False
                raise RolloutError(
                    f"the data source has no more groups: {len(self.kept)} of {self.num_groups} are there"
                )
            for samples in groups:
                self._check_new(samples)
                group = Group(samples)
                self.drawn.append(group)
                self.waiting.append(group)
                self.unjudged.append(group)
        return True

    def _check_new(self, samples: list[S]) -> None:
        if not samples:
            raise RolloutError("the data source gave a group without samples")
        for sample in samples:
            if sample.index in self._indices:
                raise RolloutError(f"the data source gave sample {sample.index} twice in one rollout")
            self._indices.add(sample.index)

    def _submit(self) -> None:
        while self.waiting and self.runner.scheduler.has_room(self.waiting[0].size):
            self.runner.start(self.waiting.popleft())

    def _judge_finished(self) -> None:
        """Judge the groups at the head of the queue that are done, in the order in which they were drawn."""
        while self.unjudged and self.unjudged[0].done and len(self.kept) < self.num_groups:
            group = self.unjudged.popleft()
            members = group.members()
            self.dropped_samples += group.size - len(members)
            self.last_error = group.last_error or self.last_error
            reason = self._reason_to_reject(group, members)
            if reason is None:
                self.rejected_in_a_row = 0
                self.kept.append(members)
                continue
            self.reasons[reason] += 1
            self.rejected.append(members or group.samples)
            self._count_rejection()

    def _reason_to_reject(self, group: Group[S], members: list[S]) -> str | None:
        """The metric that counts the rejection, or `None` to keep the group."""
        if any(sample.status is Status.ABORTED for sample in group.samples):
            self.aborted.append(group)
            return "rollout/aborted_groups"
        if not members:
            logger.warning("dropped a whole group: %s", group.last_error)
            return "rollout/unscored_groups"
        if self.executor.dynamic_filter is None:
            return None
        try:
            verdict = apply_filter(self.executor.dynamic_filter, self.executor.args, members)
        except Exception as error:
            raise RolloutError(
                f"--dynamic-sampling-filter-path failed on the group of {name_sample(members[0])}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return None if verdict.keep else f"rollout/dynamic_filter/drop_{verdict.reason or 'rejected'}"

    def _count_rejection(self) -> None:
        self.rejected_in_a_row += 1
        limit = self.executor.max_rejected_rounds * max(self.num_groups, self.executor.over_sampling_batch_size or 0)
        if self.rejected_in_a_row < limit:
            return
        counts = ", ".join(f"{count} {reason.rpartition('/')[2]}" for reason, count in self.reasons.most_common())
        last = f" The last reward error: {self.last_error}." if self.last_error else ""
        raise RolloutError(
            f"{limit} groups in a row were rejected ({counts}) and none kept: no batch can be filled.{last} "
            "Check the reward, the difficulty of the prompts and --dynamic-sampling-filter-path."
        )

    def _check_nothing_lost(self, surplus: int) -> None:
        total = len(self.kept) + len(self.rejected) + surplus
        kept = [sample.index for group in self.kept for sample in group]
        if total != len(self.drawn) or len(set(kept)) != len(kept) or not self._indices.issuperset(kept):
            raise RolloutError(
                f"{len(self.drawn)} groups were drawn, {len(self.kept)} kept, {len(self.rejected)} rejected and "
                f"{surplus} are surplus: a sample was lost or doubled"
            )

    def _metrics(self, surplus: int) -> dict[str, float]:
        counts = {
            "rollout/drawn_groups": len(self.drawn),
            "rollout/surplus_groups": surplus,
            "rollout/aborted_groups": 0,
            "rollout/dropped_samples": self.dropped_samples,
            **self.reasons,
        }
        return {name: float(count) for name, count in counts.items()}


class FixedSource(Generic[S]):
    """A given list of groups, each handed out once (evaluation sets, tests)."""

    def __init__(self, groups: list[list[S]]) -> None:
        self.groups = list(groups)

    def get_samples(self, num_samples: int) -> list[list[S]]:
        """The next `num_samples` groups, fewer at the end."""
        taken, self.groups = self.groups[:num_samples], self.groups[num_samples:]
        return taken

    def add_samples(self, samples: list[list[S]]) -> None:
        """Put groups back."""
        self.groups.extend(samples)
