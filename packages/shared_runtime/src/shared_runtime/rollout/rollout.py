"""A domain's rollout: batches of scored groups, with the hooks, recordings and numbers that both domains have."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from shared_runtime.data.source import DataSource
from shared_runtime.rollout.executor import RolloutExecutor
from shared_runtime.rollout.filters import DynamicFilter
from shared_runtime.rollout.functions import apply_rollout_hooks, call_rollout_function
from shared_runtime.rollout.group_runner import OnRewardError
from shared_runtime.rollout.metrics import reward_metrics
from shared_runtime.rollout.recording import load_recording, save_recording
from shared_runtime.rollout.submission import Granularity
from shared_runtime.rollout.types import RolloutFnTrainOutput, RolloutResult
from shared_runtime.sample import BaseSample

S = TypeVar("S", bound=BaseSample)


@dataclass(frozen=True)
class RolloutSettings:
    """How a batch is filled; the names are those of the flags.

    Attributes:
        rollout_batch_size: Groups a batch.
        over_sampling_batch_size: Groups drawn in a round; `None` draws what is missing.
        on_reward_error: `raise` or `drop`.
        reward_key: The trained entry of dict rewards.
        granularity: `--rollout-submission-granularity`.
        max_in_flight: At most this many samples are generated at once.
        save_debug_rollout_data: Where to record rollouts, with `{rollout_id}`.
        load_debug_rollout_data: Where to replay rollouts from instead of generating.
    """

    rollout_batch_size: int
    over_sampling_batch_size: int | None = None
    on_reward_error: OnRewardError = "raise"
    reward_key: str | None = None
    granularity: Granularity = "group"
    max_in_flight: int | None = None
    save_debug_rollout_data: str | None = None
    load_debug_rollout_data: str | None = None


@dataclass(frozen=True)
class RolloutHooks:
    """The user's functions of a rollout, loaded; `None` is the default of each."""

    rollout_function: Callable[..., Any] | None = None
    generate_function: Callable[..., Awaitable[Any]] | None = None
    dynamic_filter: DynamicFilter | None = None
    sample_filter: Callable[[Any, list[list[Any]]], None] | None = None
    all_samples: Callable[[Any, list[list[Any]], Any], None] | None = None

    @classmethod
    def of(cls, hooks: dict[str, Any]) -> RolloutHooks:
        """From loaded hooks by flag."""
        return cls(
            rollout_function=hooks.get("--rollout-function-path"),
            generate_function=hooks.get("--custom-generate-function-path"),
            dynamic_filter=hooks.get("--dynamic-sampling-filter-path"),
            sample_filter=hooks.get("--rollout-sample-filter-path"),
            all_samples=hooks.get("--rollout-all-samples-process-path"),
        )


class Rollout(Generic[S]):
    """Fills one training batch after the other.

    A domain gives the executor, and overrides what it does before a rollout and what it measures of one.

    Args:
        source: Where prompts come from.
        executor: Generates, scores and filters.
        args: The run's flat arguments, for hooks.
        make_sample: The domain's sample, for recordings.
        settings: Sizes and choices.
        hooks: The user's functions.
    """

    def __init__(
        self,
        *,
        source: DataSource[S],
        executor: RolloutExecutor[S],
        args: Any,
        make_sample: Callable[..., S],
        settings: RolloutSettings,
        hooks: RolloutHooks | None = None,
    ) -> None:
        self.source, self.executor, self.args, self.make_sample = source, executor, args, make_sample
        self.settings = settings
        self.hooks = hooks or RolloutHooks()

    def prepare(self, rollout_id: int) -> None:
        """Called before each rollout, in the task that runs it."""

    def measure(self, result: RolloutResult[S]) -> dict[str, float]:
        """The domain's own metrics of a rollout."""
        return {}

    async def __call__(self, rollout_id: int) -> RolloutResult[S]:
        """Roll out one batch; its metrics include `perf/rollout_time` and `perf/reward_time`.

        Raises:
            RolloutError: What stops a rollout names its sample; see `RolloutExecutor.run`.
        """
        result = await self._roll_out(rollout_id)
        removed = apply_rollout_hooks(
            result,
            self.args,
            self.source,
            sample_filter=self.hooks.sample_filter,
            all_samples=self.hooks.all_samples,
        )
        if self.settings.save_debug_rollout_data is not None:
            save_recording(self.settings.save_debug_rollout_data, rollout_id, result.samples)
        result.metrics |= {
            "rollout/removed_samples": float(removed),
            "perf/rollout_time": result.generate_seconds,
            "perf/reward_time": result.score_seconds,
            "perf/scoring_time": result.scoring_seconds,
            "perf/scoring_overlap": result.scoring_overlap,
            **reward_metrics(result.samples, self.settings.reward_key),
            **self.measure(result),
        }
        return result

    async def _roll_out(self, rollout_id: int) -> RolloutResult[S]:
        self.prepare(rollout_id)
        started = time.perf_counter()
        if self.settings.load_debug_rollout_data is not None:
            groups = load_recording(self.settings.load_debug_rollout_data, rollout_id, self.make_sample)
            return RolloutResult(groups, generate_seconds=time.perf_counter() - started)
        if hasattr(self.source, "rollout_id"):
            self.source.rollout_id = rollout_id  # buffer filters are told
        if self.hooks.rollout_function is None:
            return await self.executor.run(self.source, self.settings.rollout_batch_size)
        output = await call_rollout_function(self.hooks.rollout_function, self.args, rollout_id, self.source)
        assert isinstance(output, RolloutFnTrainOutput)
        return RolloutResult(output.samples, dict(output.metrics), generate_seconds=time.perf_counter() - started)
