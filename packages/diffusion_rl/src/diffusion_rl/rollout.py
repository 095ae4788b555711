"""The diffusion model's rollout: prompts to scored groups of images with their trajectories."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from diffusion_rl.algorithms.step_strategies import Steps, check_strategy
from diffusion_rl.sample import GenerateRequest, Sample, SamplingParams, fill_samples, microgroups, request_seed
from diffusion_rl.scoring import RewardScorer
from shared_runtime.data.prompts import PromptDataset
from shared_runtime.data.source import DataSource
from shared_runtime.engines.contract import EngineClient
from shared_runtime.rollout.evaluation import SetEvaluator
from shared_runtime.rollout.executor import RolloutExecutor
from shared_runtime.rollout.group_runner import OnRewardError
from shared_runtime.rollout.rollout import Rollout, RolloutHooks, RolloutSettings
from shared_runtime.rollout.types import RolloutResult
from shared_runtime.sample import Status

StepStrategy = Callable[[Any, Any, int, int], Steps]
"""`(args, sample, num_steps, seed) -> (sde steps, latents to return)`."""


@dataclass
class GenerateState:
    """What generating a group needs besides its samples.

    Attributes:
        args: The run's flat arguments, for step strategies.
        client: The engines.
        params: How to denoise.
        strategy: Which steps are stochastic; `None` makes all of them so.
        strategy_path: Its name, for messages.
        microgroup_size: Images a request.
        rollout_seed: Every draw derives from it and the sample's place in the run.
        weight_version: Version of the published weights, stamped on samples at dispatch.
    """

    args: Any
    client: EngineClient
    params: SamplingParams
    strategy: StepStrategy | None = None
    strategy_path: str = ""
    microgroup_size: int = 1
    rollout_seed: int = 0
    weight_version: int | None = None


async def generate_group(state: GenerateState, samples: list[Sample]) -> list[Sample]:
    """Draw one image for each sample of a group; requests of `microgroup_size` go out together.

    Seeds depend on the samples' places in the run alone, so neither microgroups nor a restart change an image. All
    members of a group have the same stochastic steps.
    """
    first = samples[0]
    base = request_seed(state.rollout_seed, first.group_index, len(samples))
    steps: Steps = (None, None)
    if state.strategy is not None:
        num_steps = state.params.num_steps
        chosen = state.strategy(state.args, first, num_steps, base)
        steps = check_strategy(chosen, num_steps, state.strategy_path)
    await asyncio.gather(
        *(
            _generate(state, samples[part.start : part.start + part.size], base + part.start, steps)
            for part in microgroups(len(samples), state.microgroup_size)
        )
    )
    return samples


async def _generate(state: GenerateState, samples: list[Sample], seed: int, steps: Steps) -> None:
    for sample in samples:
        sample.weight_version_dispatched = state.weight_version
    request = GenerateRequest(
        request_id=f"{samples[0].group_index}.{samples[0].index}",
        prompt=str(samples[0].prompt),
        num_outputs=len(samples),
        seed=seed,
        params=state.params,
        sde_steps=None if steps[0] is None else tuple(steps[0]),
        return_steps=None if steps[1] is None else tuple(steps[1]),
        sample_ids=tuple(sample.index for sample in samples),
    )
    fill_samples(samples, request, await state.client.generate(request))
    for sample in samples:
        sample.status = Status.COMPLETED


def make_executor(state: GenerateState, scorer: RewardScorer, **options: Any) -> RolloutExecutor[Sample]:
    """An executor over :func:`generate_group`; `options` are those of `RolloutExecutor`."""

    async def generate(samples: list[Sample]) -> list[Sample]:
        return await generate_group(state, samples)

    return RolloutExecutor(
        generate_group=generate, score=scorer.score, score_group=scorer.score_group, args=state.args, **options
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
        chosen = hooks or RolloutHooks()
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

    def executor(self, name: str) -> RolloutExecutor[Sample]:
        """The same seeds at every evaluation, so that images can be compared."""
        state = replace(self.state, params=self.params, strategy=_only_the_image)
        return make_executor(
            state,
            self.scorer,
            on_reward_error=self.on_reward_error,
            reward_key=self.reward_key,
            stop_when_exhausted=True,
        )


def _only_the_image(args: Any, sample: Any, num_steps: int, seed: int) -> Steps:
    return [], [num_steps]
