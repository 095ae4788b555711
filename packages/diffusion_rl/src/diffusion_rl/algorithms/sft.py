"""Flow-matching supervised training: the mean squared error of the velocity at random noise levels."""

from __future__ import annotations

import torch
from torch import Tensor

from diffusion_rl.algorithms.shapes import at_least_float32, latent_mean


def shift_sigma(sigma: Tensor, shift: float) -> Tensor:
    """σ ↦ s·σ/(1 + (s-1)·σ): moves noise levels up for s > 1, as diffusers' flow-matching scheduler does.

    Raises:
        ValueError: If the shift is not positive.
    """
    if shift <= 0.0:
        raise ValueError(f"--fsdp-flow-shift must be positive, not {shift}")
    return shift * sigma / (1.0 + (shift - 1.0) * sigma)


def logit_normal_sigmas(
    count: int, generator: torch.Generator | None = None, *, shift: float = 1.0, mean: float = 0.0, std: float = 1.0
) -> Tensor:
    """`count` noise levels: the logistic function of a normal draw, then :func:`shift_sigma`; (count,) in (0, 1).

    Paper: Stable Diffusion 3, arXiv:2403.03206.
    """
    draws = torch.randn(count, generator=generator)
    return shift_sigma(torch.sigmoid(mean + std * draws), shift)


def flow_matching_loss(velocity: Tensor, clean: Tensor, noise: Tensor) -> Tensor:
    """mean((v - (ε - x₀))²), (B,).

    Args:
        velocity: (B, ...), the model's output at x_σ = (1-σ)·x₀ + σ·ε (:func:`~diffusion_rl.algorithms.nft.add_noise`).
        clean: (B, ...), x₀.
        noise: (B, ...), ε.

    Paper: Flow Matching, arXiv:2210.02747.
    """
    velocity, clean, noise = at_least_float32(velocity, clean, noise)
    return latent_mean((velocity - (noise - clean)) ** 2)
