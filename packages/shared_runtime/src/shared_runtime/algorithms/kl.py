"""KL estimators from log-probabilities of the sampled tokens (or latents)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from shared_runtime.algorithms.masking import select

KLKind = Literal["k1", "k2", "k3", "low_var_kl"]

MAX_LOG_RATIO = 20.0
MAX_LOW_VAR_KL = 10.0


def kl_estimate(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    kind: KLKind,
    *,
    mask: Tensor | None = None,
    behavior_log_probs: Tensor | None = None,
) -> Tensor:
    """Estimate KL(π‖π_ref) at each sampled entry, with x = log π - log π_ref.

    - `k1`: x. Unbiased, high variance, may be negative.
    - `k2`: x²/2. Biased; its gradient is that of the true KL on-policy.
    - `k3`: e^(-x) - 1 + x. Unbiased, never negative.
    - `low_var_kl`: `k3` with x clamped to ±20 and the result to ±10.

    These are unbiased for samples of π itself. With `behavior_log_probs` (the policy that drew the samples) each is
    multiplied by ρ = exp(clamp(log π - log π_behavior, ±20)), which keeps its gradient, before the outer clamp of
    `low_var_kl`: value and gradient are then unbiased off-policy, and on-policy the gradient is unbiased too.

    Args:
        log_probs: Under the current policy, any shape.
        ref_log_probs: Under the reference; no gradient flows into it.
        kind: Estimator.
        mask: Non-zero entries count; the others give 0 and pass no gradient, whatever they hold.
        behavior_log_probs: Turns on the unbiased variant (`--use-unbiased-kl`); no gradient flows into it.

    Returns:
        Same shape as `log_probs`.

    Raises:
        ValueError: For an unknown `kind`.

    Sources: J. Schulman, "Approximating KL divergence" (2020); DeepSeek-V3.2, arXiv:2512.02556 (unbiased variant).
    """
    if kind not in get_args(KLKind):
        raise ValueError(f"unknown KL estimator {kind!r}; choose one of {', '.join(get_args(KLKind))}")
    x = log_probs - ref_log_probs.detach()
    if mask is not None:
        x = select(mask, x)
    if kind == "low_var_kl":
        x = x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind == "k1":
        kl = x
    elif kind == "k2":
        kl = x.square() / 2
    else:
        kl = torch.expm1(-x) + x
    if behavior_log_probs is not None:
        log_ratio = log_probs - behavior_log_probs.detach()
        if mask is not None:
            log_ratio = select(mask, log_ratio)
        kl = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * kl
    if kind == "low_var_kl":
        kl = kl.clamp(-MAX_LOW_VAR_KL, MAX_LOW_VAR_KL)
    return kl
