"""Hooks with effects that tests can count, where the examples of the documentation have none."""

from __future__ import annotations

from typing import Any

import torch

from llm_rl.generation import generate
from llm_rl.sample import Sample

EVALUATIONS: list[bool] = []
"""What `note_evaluation` was told, in order."""


def by_group(args: Any, sample: Sample) -> float:
    """Group 0 is all right, group 1 all wrong, the others half and half."""
    return {0: 1.0, 1: 0.0}.get(sample.group_index, float(sample.index % 2))


def raises(args: Any, sample: Sample) -> float:
    """Can't score sample 5."""
    if sample.index == 5:
        raise RuntimeError("the grader is gone")
    return float(sample.index % 2)


async def raises_async(args: Any, sample: Sample) -> float:
    """The same on the event loop."""
    return raises(args, sample)


def not_a_number(args: Any, sample: Sample) -> float:
    """NaN for sample 5."""
    return float("nan") if sample.index == 5 else float(sample.index % 2)


def not_a_number_in_a_group(args: Any, samples: list[Sample]) -> list[float]:
    """The same a group at a time."""
    return [not_a_number(args, sample) for sample in samples]


def always_two(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    """Every sample has advantage 2."""
    return [sample.scalar_reward() for sample in samples], [2.0] * len(samples)


async def note_evaluation(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample:
    """The stock generation, and a note of what for."""
    EVALUATIONS.append(evaluation)
    return await generate(args, sample, sampling_params)


def report_rows(args: Any, batch: Any, logits: torch.Tensor, reduce: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """A loss of 0 that says what it was given."""
    rewards = batch.segments.expand(batch.rewards)
    metrics = {"response_tokens": float(sum(batch.response_lengths)), "mean_square_reward": reduce(rewards.square())}
    return reduce(logits.sum(-1)) * 0.0, metrics


def log_alone(rollout_id: int, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: float) -> bool:
    """Leaves the default metrics out."""
    return True


def log_eval_alone(rollout_id: int, args: Any, data: Any, extra_metrics: Any) -> bool:
    """The same for evaluations."""
    return True
