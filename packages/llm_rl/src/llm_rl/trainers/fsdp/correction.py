"""Importance weights and rejection for a rollout that other weights, or another implementation, drew."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llm_rl.algorithms.metrics import AllReduce, MetricSums
from llm_rl.algorithms.mismatch import mismatch_metrics
from llm_rl.algorithms.rollout_correction import CorrectionFunction, truncated_importance_sampling
from llm_rl.algorithms.segments import Segments
from llm_rl.config.correction import CorrectionConfig
from llm_rl.trainers.fsdp.batch import MicroBatch
from shared_runtime.hooks import takes_keyword
from shared_runtime.training.plan import StepPlan


def correction_function(
    config: CorrectionConfig, custom: Callable[..., Any] | None = None, all_reduce_sum: AllReduce | None = None
) -> CorrectionFunction:
    """The correction with its parameters: those named like a flag get the flag's value, if it is set.

    Args:
        config: The flags.
        custom: `--custom-tis-function-path`; default: truncated importance sampling.
        all_reduce_sum: Adds a tensor over ranks, for functions that take it.
    """
    function = custom or truncated_importance_sampling
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(CorrectionConfig)}
    values["all_reduce_sum"] = all_reduce_sum
    known = {k: value for k, value in values.items() if value is not None and takes_keyword(function, k)}
    return partial(function, **known)


def correct_step(
    step: StepPlan, batches: Sequence[MicroBatch], correct: CorrectionFunction, all_reduce_sum: AllReduce
) -> tuple[StepPlan, MetricSums]:
    """Set the weights of an optimizer step's tokens and take the rejected ones out of its masks and denominators.

    The correction sees this rank's whole share of the step at once, so that micro-batches don't matter. Every rank
    must call.

    Args:
        step: This rank's share.
        batches: Its micro-batches, with old log-probs; changed in place.
        correct: See :func:`correction_function`.
        all_reduce_sum: Adds a tensor over ranks.

    Returns:
        The step with the number of tokens that are left, and the correction's metrics.

    Raises:
        ValueError: If a trainable token has no rollout log-prob.
    """
    whole = _whole(batches)
    if bool((~torch.cat([b.has_rollout_log_probs for b in batches]) & (whole.mask != 0)).any()):
        raise ValueError("rollout correction needs the engine's log-probs, but some rows have none")
    correction = correct(whole.train, whole.rollout, whole.mask, whole.segments)
    # A sample's rows may lie on several ranks, so what is left of it is counted over all of them.
    slots = torch.tensor([step.sample_slots[i] for m in step.micro_batches for i in m], device=whole.mask.device).long()
    counts = torch.zeros(step.global_num_samples, dtype=torch.float64, device=whole.mask.device)
    kept = whole.segments.sum((correction.mask != 0).double())
    counts = all_reduce_sum(counts.index_add(0, slots, kept))
    sizes = [b.mask.numel() for b in batches]
    per_row = counts[slots].to(whole.mask.dtype).split([len(m) for m in step.micro_batches])
    pieces = zip(batches, correction.weights.split(sizes), correction.mask.split(sizes), per_row, strict=True)
    for batch, weights, mask, num_tokens in pieces:
        batch.importance_weights, batch.mask, batch.sample_num_tokens = weights, mask, num_tokens
    return dataclasses.replace(step, global_num_tokens=int(counts.sum())), correction.metrics


def rollout_mismatch(batches: Sequence[MicroBatch]) -> MetricSums:
    """The mismatch metrics of this rank's micro-batches, which have old log-probs."""
    whole = _whole(batches)
    comparable = torch.cat([b.has_rollout_log_probs for b in batches]) & (whole.mask != 0)
    return mismatch_metrics(whole.train, whole.rollout, comparable, whole.segments)


@dataclasses.dataclass(frozen=True, eq=False)
class _Whole:
    """Micro-batches put one behind the other; tensors (T,)."""

    train: Tensor
    rollout: Tensor
    mask: Tensor
    segments: Segments


def _whole(batches: Sequence[MicroBatch]) -> _Whole:
    return _Whole(
        train=torch.cat([b.old_log_probs for b in batches if b.old_log_probs is not None]),
        rollout=torch.cat([b.rollout_log_probs for b in batches]),
        mask=torch.cat([b.mask for b in batches]),
        segments=Segments.of([n for b in batches for n in b.response_lengths], batches[0].mask.device),
    )
