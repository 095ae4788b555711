"""Evaluation on held-out prompts: the same engine, generate function and reward, other sampling, no filter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from llm_rl.generation import GenerateState, set_current_state
from llm_rl.rollout import make_executor
from llm_rl.sample import Sample, SamplingParams
from llm_rl.scoring import RewardScorer
from shared_runtime.data.prompts import PromptDataset
from shared_runtime.rollout.evaluation import EvalResult, SetEvaluator, mean
from shared_runtime.rollout.executor import RolloutExecutor
from shared_runtime.rollout.group_runner import OnRewardError
from shared_runtime.sample import Status

__all__ = ["EvalResult", "Evaluator", "eval_sampling"]


class Evaluator(SetEvaluator[Sample]):
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
        super().__init__(
            sets=sets,
            make_sample=Sample,
            args=state.args,
            n_samples_per_eval_prompt=n_samples_per_eval_prompt,
            reward_key=reward_key,
            eval_function=eval_function,
        )
        self.state = state
        self.scorer = scorer
        self.sampling = sampling
        self.on_reward_error = on_reward_error
        self.generate_function = generate_function
        self.max_in_flight = max_in_flight

    def prepare(self) -> None:
        """Evaluation functions find the engine from here on."""
        set_current_state(self.state)

    def executor(self, name: str) -> RolloutExecutor[Sample]:
        """Draws of its own for each set."""
        state = replace(self.state, stream=f"eval/{name}/", replayed_temperature=None)
        set_current_state(state)
        return make_executor(
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

    def measure(self, name: str, samples: list[Sample]) -> dict[str, float]:
        """Lengths and the share that was cut off."""
        return {
            f"eval/{name}/response_len/mean": mean([sample.response_length for sample in samples]),
            f"eval/{name}/truncated_ratio": mean([sample.status is Status.TRUNCATED for sample in samples]),
        }


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
        top_logprobs_num=0,
        return_sampling_mask=False,
    )
