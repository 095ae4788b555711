"""The language model's rollout: prompts to scored groups, with its hooks, recordings and numbers."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from llm_rl.generation import (
    GenerateFnInput,
    GenerateFunction,
    GenerateState,
    adapt_generate_function,
    generate,
    set_current_state,
    single_turn,
)
from llm_rl.sample import Sample, SamplingParams
from llm_rl.scoring import RewardScorer
from shared_runtime.data.source import DataSource
from shared_runtime.rollout.executor import RolloutExecutor
from shared_runtime.rollout.filters import DynamicFilter
from shared_runtime.rollout.functions import apply_rollout_hooks, call_rollout_function
from shared_runtime.rollout.group_runner import OnRewardError
from shared_runtime.rollout.metrics import reward_metrics
from shared_runtime.rollout.recording import load_recording, save_recording
from shared_runtime.rollout.submission import Granularity
from shared_runtime.rollout.types import RolloutFnTrainOutput, RolloutResult
from shared_runtime.sample import Status

__all__ = ["LlmRollout", "RolloutHooks", "RolloutSettings", "generate", "single_turn"]


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
    sample_filter: Callable[[Any, list[list[Sample]]], None] | None = None
    all_samples: Callable[[Any, list[list[Sample]], Any], None] | None = None


class LlmRollout:
    """Fills one training batch after the other."""

    def __init__(
        self,
        *,
        source: DataSource[Sample],
        state: GenerateState,
        scorer: RewardScorer,
        sampling: SamplingParams,
        settings: RolloutSettings,
        hooks: RolloutHooks | None = None,
    ) -> None:
        """Set up; nothing is generated yet.

        Args:
            source: Where prompts come from.
            state: What generate functions work with.
            scorer: The reward.
            sampling: How responses are drawn.
            settings: Sizes and choices.
            hooks: The user's functions.
        """
        self.source = source
        self.state = state
        self.settings = settings
        self.hooks = hooks or RolloutHooks()
        self.executor = make_executor(
            lambda: self.state,
            scorer,
            sampling,
            generate_function=self.hooks.generate_function,
            evaluation=False,
            on_reward_error=settings.on_reward_error,
            reward_key=settings.reward_key,
            dynamic_filter=self.hooks.dynamic_filter,
            over_sampling_batch_size=settings.over_sampling_batch_size,
            max_in_flight=settings.max_in_flight,
            granularity=settings.granularity,
        )

    async def __call__(self, rollout_id: int) -> RolloutResult[Sample]:
        """Roll out one batch; its metrics include `perf/rollout_time` and `perf/reward_time`.

        Raises:
            RolloutError: What stops a rollout names its sample; see `RolloutExecutor.run`.
        """
        result = await self._roll_out(rollout_id)
        removed = apply_rollout_hooks(
            result,
            self.state.args,
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
            **reward_metrics(result.samples, self.settings.reward_key),
            **length_metrics(result.samples, result.generate_seconds),
        }
        return result

    async def _roll_out(self, rollout_id: int) -> RolloutResult[Sample]:
        set_current_state(self.state)
        started = time.perf_counter()
        if self.settings.load_debug_rollout_data is not None:
            groups = load_recording(self.settings.load_debug_rollout_data, rollout_id, Sample)
            return RolloutResult(groups, generate_seconds=time.perf_counter() - started)
        if hasattr(self.source, "rollout_id"):
            self.source.rollout_id = rollout_id  # buffer filters are told
        if self.hooks.rollout_function is None:
            return await self.executor.run(self.source, self.settings.rollout_batch_size)
        output = await call_rollout_function(self.hooks.rollout_function, self.state.args, rollout_id, self.source)
        assert isinstance(output, RolloutFnTrainOutput)
        return RolloutResult(output.samples, dict(output.metrics), generate_seconds=time.perf_counter() - started)


def make_executor(
    state: Callable[[], GenerateState],
    scorer: RewardScorer,
    sampling: SamplingParams,
    *,
    generate_function: Callable[..., Awaitable[Any]] | None,
    evaluation: bool,
    **options: Any,
) -> RolloutExecutor[Sample]:
    """An executor over the language model's generate functions; `options` are those of `RolloutExecutor`."""
    function: GenerateFunction = adapt_generate_function(generate_function or single_turn)
    params = asdict(sampling)

    async def generate_one(sample: Sample) -> Sample:
        return await function(GenerateFnInput(state(), sample, dict(params), evaluation))

    return RolloutExecutor(
        generate=generate_one, score=scorer.score, score_group=scorer.score_group, args=state().args, **options
    )


def length_metrics(groups: list[list[Sample]], seconds: float) -> dict[str, float]:
    """Response lengths in tokens, the share that was cut off, and response tokens a second."""
    samples = [sample for group in groups for sample in group]
    if not samples:
        return {}
    lengths = np.array([sample.response_length for sample in samples])
    return {
        "rollout/response_len/mean": float(lengths.mean()),
        "rollout/response_len/min": float(lengths.min()),
        "rollout/response_len/max": float(lengths.max()),
        "rollout/truncated_ratio": sum(s.status is Status.TRUNCATED for s in samples) / len(samples),
        "perf/tokens_per_s": float(lengths.sum()) / seconds if seconds > 0 else 0.0,
    }
