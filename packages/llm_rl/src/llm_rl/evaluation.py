"""Evaluation on held-out prompts: the same engine, generate function and reward, other sampling, no filter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from llm_rl.generation import GenerateState, set_current_state
from llm_rl.rollout import make_executor
from llm_rl.sample import Sample, SamplingParams
from llm_rl.scoring import RewardScorer
from shared_runtime.data.prompts import PromptDataset
from shared_runtime.rollout.executor import FixedSource
from shared_runtime.rollout.functions import call_rollout_function
from shared_runtime.rollout.group_runner import OnRewardError
from shared_runtime.rollout.metrics import pass_rates
from shared_runtime.rollout.types import RolloutFnEvalOutput
from shared_runtime.sample import Status


@dataclass
class EvalResult:
    """What an evaluation gave.

    Attributes:
        metrics: `eval/<set>` is the mean reward of a set.
        data: For every set `rewards`, `truncated` and `samples`, one entry a sample.
    """

    metrics: dict[str, float]
    data: dict[str, dict[str, list[Any]]] = field(default_factory=dict)


class Evaluator:
    """Scores every prompt of the evaluation sets."""

    def __init__(
        self,
        *,
        sets: dict[str, PromptDataset],
        state: GenerateState,
        scorer: RewardScorer,
        sampling: SamplingParams,
        n_samples_per_eval_prompt: int = 1,
        on_reward_error: OnRewardError = "raise",
        reward_key: str | None = None,
        generate_function: Callable[..., Any] | None = None,
        eval_function: Callable[..., Any] | None = None,
        max_in_flight: int | None = None,
    ) -> None:
        """Set up.

        Args:
            sets: Prompts by name of the set.
            state: What generate functions work with.
            scorer: The reward.
            sampling: How responses are drawn (`eval_sampling`).
            n_samples_per_eval_prompt: Responses a prompt.
            on_reward_error: As in the rollout; dropped samples are counted in `eval/<set>/dropped_samples`.
            reward_key: The entry of dict rewards.
            generate_function: `--custom-generate-function-path`; called with `evaluation=True`.
            eval_function: `--eval-function-path`, replaces all of this.
            max_in_flight: At most this many samples of a set are generated at once.
        """
        self.sets = sets
        self.state = state
        self.scorer = scorer
        self.sampling = sampling
        self.n_samples_per_eval_prompt = n_samples_per_eval_prompt
        self.on_reward_error = on_reward_error
        self.reward_key = reward_key
        self.generate_function = generate_function
        self.eval_function = eval_function
        self.max_in_flight = max_in_flight

    async def __call__(self, rollout_id: int) -> EvalResult:
        """Evaluate all sets at once, so that their requests fill the engine's batches together.

        Raises:
            RolloutError: As in a rollout.
        """
        if self.eval_function is not None:
            set_current_state(self.state)
            output = await call_rollout_function(self.eval_function, self.state.args, rollout_id, None, evaluation=True)
            assert isinstance(output, RolloutFnEvalOutput)
            means = {f"eval/{name}": _mean(entry["rewards"]) for name, entry in output.data.items()}
            return EvalResult(means | output.metrics, output.data)
        results = await asyncio.gather(*(self._evaluate(name, dataset) for name, dataset in self.sets.items()))
        metrics = {key: value for result in results for key, value in result.metrics.items()}
        return EvalResult(metrics, {name: r.data[name] for name, r in zip(self.sets, results, strict=True)})

    async def _evaluate(self, name: str, dataset: PromptDataset) -> EvalResult:
        state = replace(self.state, stream=f"eval/{name}/")
        set_current_state(state)
        executor = make_executor(
            lambda: state,
            self.scorer,
            self.sampling,
            generate_function=self.generate_function,
            evaluation=True,
            on_reward_error=self.on_reward_error,
            reward_key=self.reward_key,
            max_in_flight=self.max_in_flight,
            stop_when_exhausted=True,
        )
        groups = eval_groups(dataset, self.n_samples_per_eval_prompt)
        result = await executor.run(FixedSource(groups), len(groups))
        return self._summary(name, result.samples, result.metrics["rollout/dropped_samples"])

    def _summary(self, name: str, groups: list[list[Sample]], dropped: float) -> EvalResult:
        samples = [sample for group in groups for sample in group]
        rewards = [[sample.scalar_reward(self.reward_key) for sample in group] for group in groups]
        truncated = [sample.status is Status.TRUNCATED for sample in samples]
        flat = [reward for group in rewards for reward in group]
        metrics = {
            f"eval/{name}": _mean(flat),
            f"eval/{name}/response_len/mean": _mean([sample.response_length for sample in samples]),
            f"eval/{name}/truncated_ratio": _mean(truncated),
            f"eval/{name}/dropped_samples": dropped,
        }
        if self.n_samples_per_eval_prompt > 1:
            metrics |= {f"eval/{name}/pass@{k}": value for k, value in pass_rates(rewards).items()}
        return EvalResult(metrics, {name: {"rewards": flat, "truncated": truncated, "samples": samples}})


def eval_groups(dataset: PromptDataset, n_samples: int) -> list[list[Sample]]:
    """One group a prompt; indices count within the set."""
    return [
        [
            Sample(
                index=position * n_samples + member,
                group_index=position,
                prompt=row.prompt,
                label=row.label,
                metadata=dict(row.metadata),
            )
            for member in range(n_samples)
        ]
        for position, row in enumerate(dataset)
    ]


def eval_sampling(
    rollout: SamplingParams,
    *,
    max_response_len: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
) -> SamplingParams:
    """Sampling of evaluations: the rollout's, with what is given here in its place."""
    return replace(
        rollout,
        max_new_tokens=rollout.max_new_tokens if max_response_len is None else max_response_len,
        temperature=rollout.temperature if temperature is None else temperature,
        top_p=rollout.top_p if top_p is None else top_p,
        top_k=rollout.top_k if top_k is None else top_k,
    )


def _mean(values: list[Any]) -> float:
    """NaN where nothing was scored: that is not a score of 0."""
    return float(sum(values) / len(values)) if values else float("nan")
