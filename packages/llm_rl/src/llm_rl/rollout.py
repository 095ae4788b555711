"""The language model's rollout: prompts to scored groups, with its hooks, recordings and numbers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
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
from shared_runtime.rollout.rollout import Rollout, RolloutHooks, RolloutSettings
from shared_runtime.rollout.types import RolloutResult
from shared_runtime.sample import Status

__all__ = ["LlmRollout", "RolloutHooks", "RolloutSettings", "generate", "single_turn"]


class LlmRollout(Rollout[Sample]):
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
        self.state = state
        chosen = hooks or RolloutHooks()
        executor = make_executor(
            lambda: self.state,
            scorer,
            sampling,
            generate_function=chosen.generate_function,
            evaluation=False,
            on_reward_error=settings.on_reward_error,
            reward_key=settings.reward_key,
            dynamic_filter=chosen.dynamic_filter,
            over_sampling_batch_size=settings.over_sampling_batch_size,
            max_in_flight=settings.max_in_flight,
            granularity=settings.granularity,
        )
        super().__init__(
            source=source, executor=executor, args=state.args, make_sample=Sample, settings=settings, hooks=chosen
        )

    def prepare(self, rollout_id: int) -> None:
        """Generate functions find the engine from here on."""
        set_current_state(self.state)

    def measure(self, result: RolloutResult[Sample]) -> dict[str, float]:
        """Lengths and tokens a second."""
        return length_metrics(result.samples, result.generate_seconds)


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
