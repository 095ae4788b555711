"""GRPO-Guard: a ratio that is centred on 1 and has the same spread at every denoising step."""

from __future__ import annotations

from torch import Tensor

from diffusion_rl.algorithms.shapes import at_least_float32, latent_mean


def guard_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mean: Tensor, old_mean: Tensor, std: Tensor) -> Tensor:
    """(Δlog p + mean((μ - μ_old)²)/(2·std²))·std with std = √(-dt)·s, (B,).

    With y = μ_old + std·ε, Δlog p is mean(ε·(μ - μ_old))/std less the squared shift: the shift pulls the mean of the
    ratio below 1, so clipping bites on one side only, and 1/std makes late steps dominate. Adding the square back and
    multiplying by std takes both away.

    Args:
        log_probs: (B,), of the model that trains, with constants.
        old_log_probs: (B,), of the model that sampled.
        mean: (B, ...), of the model that trains.
        old_mean: (B, ...), of the model that sampled.
        std: (B, 1, ..., 1) or (), the noise's standard deviation.

    Paper: GRPO-Guard, arXiv:2510.22319.
    """
    log_probs, old_log_probs, mean, old_mean, std = at_least_float32(
        log_probs, old_log_probs.detach(), mean, old_mean.detach(), std
    )
    shift = latent_mean((mean - old_mean) ** 2 / (2.0 * std**2))
    return (log_probs - old_log_probs + shift) * std.flatten()
