"""Evaluation on held-out prompts: the same engine and reward, the domain's own sampling, no filter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from shared_runtime.data.prompts import PromptDataset
from shared_runtime.rollout.executor import FixedSource, RolloutExecutor
from shared_runtime.rollout.functions import call_rollout_function
from shared_runtime.rollout.metrics import pass_rates
from shared_runtime.rollout.types import RolloutFnEvalOutput
from shared_runtime.sample import BaseSample, Status

S = TypeVar("S", bound=BaseSample)


@dataclass
class EvalResult:
    """What an evaluation gave.

    Attributes:
        metrics: `eval/<set>` is the mean reward of a set.
        data: For every set `rewards`, `truncated` and `samples`, one entry a sample.
    """

    metrics: dict[str, float]
    data: dict[str, dict[str, list[Any]]] = field(default_factory=dict)


class SetEvaluator(Generic[S]):
    """Scores every prompt of the evaluation sets.

    A domain gives the executor of a set (:meth:`executor`), and may measure more of one (:meth:`measure`).

    Args:
        sets: Prompts by name of the set.
        make_sample: The domain's sample.
        args: The run's flat arguments, for hooks.
        n_samples_per_eval_prompt: Samples a prompt.
        reward_key: The entry of dict rewards.
        eval_function: `--eval-function-path`, replaces all of this.
    """

    def __init__(
        self,
        *,
        sets: Mapping[str, PromptDataset],
        make_sample: Callable[..., S],
        args: Any,
        n_samples_per_eval_prompt: int = 1,
        reward_key: str | None = None,
        eval_function: Callable[..., Any] | None = None,
    ) -> None:
        self.sets, self.make_sample, self.args = sets, make_sample, args
        self.n_samples_per_eval_prompt = n_samples_per_eval_prompt
        self.reward_key = reward_key
        self.eval_function = eval_function

    def prepare(self) -> None:
        """Called before a custom evaluation function."""

    def executor(self, name: str) -> RolloutExecutor[S]:
        """What generates and scores a set; it must stop when its source is exhausted."""
        raise NotImplementedError

    def measure(self, name: str, samples: list[S]) -> dict[str, float]:
        """The domain's own metrics of a set."""
        return {}

    async def __call__(self, rollout_id: int) -> EvalResult:
        """Evaluate all sets at once, so that their requests fill the engine's batches together.

        Raises:
            RolloutError: As in a rollout.
        """
        if self.eval_function is not None:
            self.prepare()
            output = await call_rollout_function(self.eval_function, self.args, rollout_id, None, evaluation=True)
            assert isinstance(output, RolloutFnEvalOutput)
            means = {f"eval/{name}": mean(entry["rewards"]) for name, entry in output.data.items()}
            return EvalResult(means | output.metrics, output.data)
        results = await asyncio.gather(*(self._evaluate(name, dataset) for name, dataset in self.sets.items()))
        metrics = {key: value for result in results for key, value in result.metrics.items()}
        return EvalResult(metrics, {name: r.data[name] for name, r in zip(self.sets, results, strict=True)})

    async def _evaluate(self, name: str, dataset: PromptDataset) -> EvalResult:
        executor = self.executor(name)
        groups = eval_groups(dataset, self.n_samples_per_eval_prompt, self.make_sample)
        result = await executor.run(FixedSource(groups), len(groups))
        return self._summary(name, result.samples, result.metrics["rollout/dropped_samples"])

    def _summary(self, name: str, groups: list[list[S]], dropped: float) -> EvalResult:
        samples = [sample for group in groups for sample in group]
        rewards = [[sample.scalar_reward(self.reward_key) for sample in group] for group in groups]
        truncated = [sample.status is Status.TRUNCATED for sample in samples]
        flat = [reward for group in rewards for reward in group]
        metrics = {
            f"eval/{name}": mean(flat),
            **self.measure(name, samples),
            f"eval/{name}/dropped_samples": dropped,
        }
        if self.n_samples_per_eval_prompt > 1:
            metrics |= {f"eval/{name}/pass@{k}": value for k, value in pass_rates(rewards).items()}
        return EvalResult(metrics, {name: {"rewards": flat, "truncated": truncated, "samples": samples}})


def eval_groups(dataset: PromptDataset, n_samples: int, make_sample: Callable[..., S]) -> list[list[S]]:
    """One group a prompt; indices count within the set."""
    return [
        [
            make_sample(
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


def mean(values: list[Any]) -> float:
    """NaN where nothing was scored: that is not a score of 0."""
    return float(sum(values) / len(values)) if values else float("nan")
