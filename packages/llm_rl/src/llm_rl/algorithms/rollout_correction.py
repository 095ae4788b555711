"""Importance weights for the gap between the policy that trains and the one that sampled: TIS and IcePop.

A correction takes the trainer's log-probs *before* the update (old log-probs) and those the engine reported. It gives a
weight for each token's loss, and a mask, which a correction that rejects makes smaller.

Weight and mask differ in the denominator. A token of weight 0 (IcePop, MIS in mode `mask`) still counts in it. A
rejected token does not: it is as if the loss mask had been 0 there, so `reduction.token_weights` is called with the
returned mask and with token counts taken from it, over all ranks. A sample that loses all its tokens still counts as a
sample and adds 0, as a fully masked sample does, so that rejecting most of a batch makes the step smaller instead of
making the few samples that remain louder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from llm_rl.algorithms.metrics import MetricSums
from llm_rl.algorithms.segments import Segments
from shared_runtime.algorithms.masking import select

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, eq=False)
class Correction:
    """What a correction does to the loss; no gradient flows through any of it.

    Attributes:
        weights: (T,), multiplies each token's policy loss; 0 at masked tokens.
        mask: (T,), the loss mask, less what was rejected.
        metrics: Over the tokens of the loss mask that came in, rejected ones included.
    """

    weights: Tensor
    mask: Tensor
    metrics: MetricSums = field(default_factory=MetricSums)


class CorrectionFunction(Protocol):
    """What `--custom-tis-function-path` names; keyword parameters named like a flag get the flag's value."""

    def __call__(
        self, train_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, segments: Segments
    ) -> Correction:
        """Weights and mask for (T,) log-probs of the trainer and of the engine."""


def log_importance_ratio(train_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """log π_train - log π_rollout at trainable tokens, 0 elsewhere; (T,), not clamped, no gradient."""
    return select(mask, train_log_probs.detach() - rollout_log_probs.detach())


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(clamp(log_ratio, ±20))."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncated_importance_sampling(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    segments: Segments,
    *,
    tis_clip: float = 2.0,
    tis_clip_low: float = 0.0,
) -> Correction:
    """TIS: w = clamp(π_train/π_rollout, tis_clip_low, tis_clip) at each token.

    Args:
        train_log_probs: (T,), old log-probs computed by the trainer.
        rollout_log_probs: (T,), of the engine.
        mask: (T,), non-zero means trainable.
        segments: Borders of the samples.
        tis_clip: `--tis-clip`.
        tis_clip_low: `--tis-clip-low`.

    Returns:
        Weights, the mask as it was, and the metrics `tis` (mean weight before clamping), `tis_clipfrac`, `tis_abs`
        (mean |w - 1| before clamping).

    Raises:
        ValueError: If the bounds are out of order.

    Source: "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", fengyao.notion.site/off-policy-rl.
    """
    ratio = _checked_ratio(train_log_probs, rollout_log_probs, mask, tis_clip_low, tis_clip)
    weights = ratio.clamp(tis_clip_low, tis_clip)
    return Correction(select(mask, weights), mask, _metrics(ratio, weights, mask))


def icepop(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    segments: Segments,
    *,
    tis_clip: float = 2.0,
    tis_clip_low: float = 0.5,
) -> Correction:
    """IcePop: w = π_train/π_rollout where it lies in [tis_clip_low, tis_clip], else 0.

    Arguments, result and errors as :func:`truncated_importance_sampling`.

    Source: Ring-1T, arXiv:2510.18855.
    """
    ratio = _checked_ratio(train_log_probs, rollout_log_probs, mask, tis_clip_low, tis_clip)
    weights = select((ratio >= tis_clip_low) & (ratio <= tis_clip), ratio)
    return Correction(select(mask, weights), mask, _metrics(ratio, weights, mask))


def _checked_ratio(train: Tensor, rollout: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    if not 0 <= low <= high:
        raise ValueError(f"importance weights need 0 <= lower bound <= upper bound, not {low} and {high}")
    return bounded_exp(log_importance_ratio(train, rollout, mask))


def _metrics(ratio: Tensor, weights: Tensor, mask: Tensor) -> MetricSums:
    metrics = MetricSums()
    metrics.add_mean("tis", ratio, mask)
    metrics.add_mean("tis_clipfrac", (weights != ratio).float(), mask)
    metrics.add_mean("tis_abs", (ratio - 1).abs(), mask)
    return metrics
