"""Importance sampling and rejection at token, sequence or geometric level (MIS)."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from llm_rl.algorithms.metrics import AllReduce, MetricSums
from llm_rl.algorithms.rollout_correction import Correction, bounded_exp, log_importance_ratio
from llm_rl.algorithms.segments import Segments
from shared_runtime.algorithms.masking import select

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "clip", "mask"]


def level_log_ratio(log_ratio: Tensor, mask: Tensor, segments: Segments, level: Level) -> Tensor:
    """Each token's log-ratio at the given level; (T,), 0 at masked tokens.

    - `token`: its own. Biased, low variance, robust.
    - `sequence`: the sum over its sample's trainable tokens (the product of ratios). Unbiased, high variance.
    - `geometric`: their mean (the geometric mean of ratios). Biased, low variance.
    """
    if level == "token":
        return select(mask, log_ratio)
    per_sample = segments.sum(log_ratio, mask) if level == "sequence" else segments.mean(log_ratio, mask)
    return select(mask, segments.expand(per_sample))


def mis_correction(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    mask: Tensor,
    segments: Segments,
    *,
    use_tis: bool = True,
    tis_level: Level = "token",
    tis_mode: Mode = "truncate",
    tis_lower_bound: float | None = None,
    tis_upper_bound: float | None = 2.0,
    tis_batch_normalize: bool = False,
    use_rs: bool = False,
    rs_level: Level = "token",
    rs_lower_bound: float | None = None,
    rs_upper_bound: float | None = None,
    rs_veto_threshold: float | None = None,
    all_reduce_sum: AllReduce | None = None,
) -> Correction:
    """Weight, and reject, by w = exp(clamp(level log-ratio, ±20)).

    Weights (`use_tis`): mode `truncate` is min(w, upper); `clip` is clamp(w, lower, upper); `mask` keeps w inside
    [lower, upper] and gives 0 outside. `tis_batch_normalize` then divides by the mean weight, over trainable tokens
    at token level and over samples at sequence level.

    Rejection (`use_rs`): tokens whose w at `rs_level` lies outside the bounds leave the mask. The veto, on its own or
    with the others, removes every token of a sample in which a single token has π_train/π_rollout < threshold.

    Args:
        train_log_probs: (T,), old log-probs computed by the trainer.
        rollout_log_probs: (T,), of the engine.
        mask: (T,), non-zero means trainable.
        segments: Borders of the samples.
        use_tis: Weight the loss; without it all weights are 1.
        tis_level: Level of the weights.
        tis_mode: How bounds act.
        tis_lower_bound: Needed by `clip` and `mask`.
        tis_upper_bound: Needed by every mode.
        tis_batch_normalize: Normalise to mean 1. The batch is what this call sees plus, through `all_reduce_sum`, the
            other ranks: call it on a whole optimizer step, not on a micro-batch.
        use_rs: Reject.
        rs_level: Level of rejection.
        rs_lower_bound: Default `tis_lower_bound`.
        rs_upper_bound: Default `tis_upper_bound`.
        rs_veto_threshold: Turns on the veto; typically 1e-4 to 1e-6.
        all_reduce_sum: Adds a tensor over ranks; used by the normalisation alone.

    Returns:
        Weights (T,), the mask less the rejected tokens, and the `mis_*` metrics of weights and rejection.

    Raises:
        ValueError: For an unknown level or mode, missing or disordered bounds, a threshold that isn't positive, or
            `tis_batch_normalize` with the geometric level.

    Source: "When Speed Kills Stability", yingru.notion.site (2025).
    """
    _check_choice("tis_level", tis_level, Level)
    _check_choice("tis_mode", tis_mode, Mode)
    _check_choice("rs_level", rs_level, Level)
    if use_tis and tis_batch_normalize and tis_level == "geometric":
        raise ValueError("tis_batch_normalize works at token and sequence level, not with tis_level geometric")
    if rs_veto_threshold is not None and rs_veto_threshold <= 0:
        raise ValueError(f"rs_veto_threshold must be positive, not {rs_veto_threshold}")

    log_ratio = log_importance_ratio(train_log_probs, rollout_log_probs, mask)
    metrics = MetricSums()
    kept = mask != 0

    weights = torch.ones_like(log_ratio)
    if use_tis:
        raw = bounded_exp(level_log_ratio(log_ratio, mask, segments, tis_level))
        lowest = 0.0 if tis_mode == "truncate" else tis_lower_bound
        weights = _bound(raw, tis_mode, *_bounds(f"tis_mode {tis_mode}", lowest, tis_upper_bound), mask, metrics)
        metrics.add_mean("mis_tis_weight_before_bound", raw, mask)
        metrics.add_mean("mis_tis_weight_after_bound", weights, mask)
    if use_rs:
        low, high = _bounds(
            "rejection sampling (use_rs)",
            tis_lower_bound if rs_lower_bound is None else rs_lower_bound,
            tis_upper_bound if rs_upper_bound is None else rs_upper_bound,
        )
        ratio = bounded_exp(level_log_ratio(log_ratio, mask, segments, rs_level))
        below, above = ratio < low, ratio > high
        kept = kept & ~below & ~above
        metrics.add_mean("mis_rs_mask_fraction_low", below.float(), mask)
        metrics.add_mean("mis_rs_mask_fraction_high", above.float(), mask)
    if rs_veto_threshold is not None:
        catastrophic = log_ratio < math.log(rs_veto_threshold)
        vetoed = segments.count(catastrophic) > 0
        kept = kept & ~segments.expand(vetoed)
        metrics.add_mean("mis_rs_catastrophic_token_fraction", catastrophic.float(), mask)
        metrics.add_mean("mis_rs_catastrophic_seq_fraction", vetoed.float(), segments.count(mask))
    if use_tis:
        metrics.add_mean("mis_is_ratio_mean_after_tis_rs", weights, kept)
        factor = torch.ones((), dtype=torch.float64, device=weights.device)
        if tis_batch_normalize:
            factor = _mean_weight(weights, mask, segments, tis_level, all_reduce_sum)
            weights = weights / factor.to(weights.dtype)
        metrics.add_mean("mis_batch_norm_factor", factor.view(1), torch.ones(1, device=weights.device))
        metrics.add_mean("mis_is_ratio_mean_final", weights, kept)
        metrics.add_extremes(weights, kept, maximum="mis_is_ratio_max_final", minimum="mis_is_ratio_min_final")
    return Correction(select(mask, weights), torch.where(kept, mask, torch.zeros_like(mask)), metrics)


def _bound(raw: Tensor, mode: Mode, low: float, high: float, mask: Tensor, metrics: MetricSums) -> Tensor:
    above = raw > high
    if mode == "truncate":
        metrics.add_mean("mis_tis_truncate_fraction", above.float(), mask)
        return raw.clamp(max=high)
    below = raw < low
    metrics.add_mean(f"mis_tis_{mode}_fraction_low", below.float(), mask)
    metrics.add_mean(f"mis_tis_{mode}_fraction_high", above.float(), mask)
    return raw.clamp(low, high) if mode == "clip" else select(~below & ~above, raw)


def _mean_weight(
    weights: Tensor, mask: Tensor, segments: Segments, level: Level, all_reduce_sum: AllReduce | None
) -> Tensor:
    """Mean weight over trainable tokens, or over samples that have any; 1 if all weights are 0."""
    if level == "token":
        values, chosen = weights, mask != 0
    else:
        values, chosen = segments.mean(weights, mask), segments.count(mask) > 0
    sums = torch.stack([select(chosen, values).double().sum(), chosen.sum().double()])
    total, count = (all_reduce_sum(sums) if all_reduce_sum else sums).unbind()
    return torch.where(total > 0, total / count.clamp(min=1), torch.ones_like(total))


def _check_choice(name: str, value: str, choices: object) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, not {value!r}")


def _bounds(what: str, low: float | None, high: float | None) -> tuple[float, float]:
    if low is None or high is None:
        raise ValueError(f"{what} needs a lower and an upper bound, got {low} and {high}")
    if not 0 <= low <= high:
        raise ValueError(f"{what} needs 0 <= lower bound <= upper bound, got {low} and {high}")
    return low, high
