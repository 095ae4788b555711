"""How far the engine's probabilities are from the trainer's, as metrics; they never change a loss."""

from __future__ import annotations

import torch
from torch import Tensor

from llm_rl.algorithms.metrics import MetricSums
from llm_rl.algorithms.rollout_correction import bounded_exp, log_importance_ratio
from llm_rl.algorithms.segments import Segments


def mismatch_metrics(
    train_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor, segments: Segments
) -> MetricSums:
    """The mismatch metrics of `--get-mismatch-metrics`, from r = log π_train - log π_rollout.

    Over trainable tokens: `mis_kl` E[-r], `mis_k3_kl` E[e^r - r - 1], `mis_chi2_token` E[e^2r] - 1,
    `train_rollout_logprob_abs_diff` E|r|. Over samples, from each sample's mean log-probs: `mis_training_log_ppl`,
    `mis_training_ppl`, `mis_rollout_log_ppl`, `mis_rollout_ppl`, `mis_log_ppl_diff` (training minus rollout),
    `mis_log_ppl_abs_diff`, `mis_ppl_ratio` (training over rollout), and from the sum of r, `mis_chi2_seq`. Samples
    without trainable tokens don't count; log-ratios are clamped to ±20 before exp.

    Args:
        train_log_probs: (T,), of the trainer.
        rollout_log_probs: (T,), of the engine.
        mask: (T,), non-zero means trainable.
        segments: Borders of the samples.

    Returns:
        Sums that merge over micro-batches and ranks.
    """
    metrics = MetricSums()
    r = log_importance_ratio(train_log_probs, rollout_log_probs, mask)
    bounded = r.clamp(-20.0, 20.0)
    metrics.add_mean("mis_kl", -r, mask)
    metrics.add_mean("mis_k3_kl", torch.expm1(bounded) - bounded, mask)
    metrics.add_mean("mis_chi2_token", bounded_exp(2 * r) - 1, mask)
    metrics.add_mean("train_rollout_logprob_abs_diff", r.abs(), mask)

    counted = segments.count(mask)
    train = -segments.mean(train_log_probs.detach(), mask)
    rollout = -segments.mean(rollout_log_probs.detach(), mask)
    metrics.add_mean("mis_training_log_ppl", train, counted)
    metrics.add_mean("mis_training_ppl", train.exp(), counted)
    metrics.add_mean("mis_rollout_log_ppl", rollout, counted)
    metrics.add_mean("mis_rollout_ppl", rollout.exp(), counted)
    metrics.add_mean("mis_log_ppl_diff", train - rollout, counted)
    metrics.add_mean("mis_log_ppl_abs_diff", (train - rollout).abs(), counted)
    metrics.add_mean("mis_ppl_ratio", bounded_exp(train - rollout), counted)
    metrics.add_mean("mis_chi2_seq", bounded_exp(2 * segments.sum(r, mask)) - 1, counted)
    return metrics
