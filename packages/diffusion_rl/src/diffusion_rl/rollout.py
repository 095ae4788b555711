"""The diffusion model's rollout: prompts to scored groups of images with their trajectories."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from diffusion_rl.algorithms.step_strategies import Steps
from diffusion_rl.generation import GenerateState, generate_microgroup, set_current_state
from diffusion_rl.sample import Sample
from diffusion_rl.scoring import RewardScorer
from shared_runtime.data.prompts import PromptDataset
from shared_runtime.data.source import DataSource
from shared_runtime.rollout.evaluation import SetEvaluator
from shared_runtime.rollout.executor import RolloutExecutor
from shared_runtime.rollout.group_runner import OnRewardError
from shared_runtime.rollout.rollout import Rollout, RolloutHooks, RolloutSettings
from shared_runtime.rollout.types import RolloutResult


def make_executor(state: GenerateState, scorer: RewardScorer, **options: Any) -> RolloutExecutor[Sample]:
    """An executor over microgroups, each scored as soon as it is there; `options` are those of `RolloutExecutor`."""

    async def generate(group: list[Sample], part: range) -> list[Sample]:
        return await generate_microgroup(state, group, part)

    return RolloutExecutor(
        generate_microgroup=generate,
        microgroup_size=state.microgroup_size,
        score=scorer.score,
        score_microgroup=scorer.score_microgroup,
        score_group=scorer.score_group,
        args=state.args,
        **options,
    )


class DiffusionRollout(Rollout[Sample]):
    """Fills one training batch after the other.

    Args:
        source: Where prompts come from.
        state: What generating works with.
        scorer: The reward.
        settings: Sizes and choices.
        hooks: The user's functions.
    """

    def __init__(
        self,
        *,
        source: DataSource[Sample],
        state: GenerateState,
        scorer: RewardScorer,
        settings: RolloutSettings,
        hooks: RolloutHooks | None = None,
    ) -> None:
        self.state, chosen = state, hooks or RolloutHooks()
        executor = make_executor(
            state,
            scorer,
            on_reward_error=settings.on_reward_error,
            reward_key=settings.reward_key,
            dynamic_filter=chosen.dynamic_filter,
            over_sampling_batch_size=settings.over_sampling_batch_size,
            max_in_flight=settings.max_in_flight,
        )
        super().__init__(
            source=source, executor=executor, args=state.args, make_sample=Sample, settings=settings, hooks=chosen
        )

    def prepare(self, rollout_id: int) -> None:
        """Rollout functions find the engine from here on."""
        set_current_state(self.state)

    def measure(self, result: RolloutResult[Sample]) -> dict[str, float]:
        """Images a second."""
        images = sum(len(group) for group in result.samples)
        return {"perf/images_per_s": images / result.generate_seconds if result.generate_seconds > 0 else 0.0}


class Evaluator(SetEvaluator[Sample]):
    """Scores every prompt of the evaluation sets, along the ODE: without noise, differences are the model's.

    Args:
        sets: Prompts by name of the set.
        state: As in the rollout.
        scorer: The reward.
        num_steps: Denoising steps.
        n_samples_per_eval_prompt: Images a prompt.
        on_reward_error: As in the rollout.
        reward_key: The entry of dict rewards.
        eval_function: `--eval-function-path`, replaces all of this.
    """

    def __init__(
        self,
        *,
        sets: dict[str, PromptDataset],
        state: GenerateState,
        scorer: RewardScorer,
        num_steps: int,
        n_samples_per_eval_prompt: int = 1,
        on_reward_error: OnRewardError = "raise",
        reward_key: str | None = None,
        eval_function: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__(
            sets=sets,
            make_sample=Sample,
            args=state.args,
            n_samples_per_eval_prompt=n_samples_per_eval_prompt,
            reward_key=reward_key,
            eval_function=eval_function,
        )
        self.state, self.scorer, self.on_reward_error = state, scorer, on_reward_error
        self.params = replace(state.params, num_steps=num_steps, sde_type="ode", debug=False)

    def prepare(self) -> None:
        """An evaluation function finds the engine from here on."""
        set_current_state(self._state())

    def executor(self, name: str) -> RolloutExecutor[Sample]:
        """The same seeds at every evaluation, so that images can be compared."""
        return make_executor(
            self._state(),
            self.scorer,
            on_reward_error=self.on_reward_error,
            reward_key=self.reward_key,
            stop_when_exhausted=True,
        )

    def _state(self) -> GenerateState:
        return replace(self.state, params=self.params, strategy=_only_the_image, evaluation=True)


def _only_the_image(args: Any, sample: Any, num_steps: int, seed: int) -> Steps:
    return [], [num_steps]
