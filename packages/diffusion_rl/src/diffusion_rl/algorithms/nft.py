"""DiffusionNFT: reinforcement on the forward process. Images, not trajectories, are what it trains on.

A rewarded image x₀ is noised to x_t; the loss pulls an implicit positive policy towards it by r and an implicit
negative one by 1 - r. π_old, the policy that sampled, is the moving average of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffusion_rl.algorithms.shapes import at_least_float32, latent_mean, per_sample

_MIN_WEIGHT = 1e-5


@dataclass(frozen=True, eq=False)
class NftLoss:
    """One loss a pair, and its parts; everything is (B,).

    Attributes:
        loss: What is minimised.
        positive: Error of the positive branch, no gradient.
        negative: Error of the negative branch, no gradient.
    """

    loss: Tensor
    positive: Tensor
    negative: Tensor


def optimality(advantages: Tensor, *, adv_clip_max: float = 5.0) -> Tensor:
    """r = clip(clip(A, ±A_max)/(2·A_max) + ½, 0, 1): how good each image is within its group, (B,)."""
    return (advantages.clamp(-adv_clip_max, adv_clip_max) / (2.0 * adv_clip_max) + 0.5).clamp(0.0, 1.0)


def add_noise(clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """x_t = (1-t)·x₀ + t·ε.

    Args:
        clean: (B, ...).
        noise: (B, ...), standard normal.
        t: (B,) or (), in [0, 1].
    """
    clean, noise, t = at_least_float32(clean, noise, t)
    t = per_sample(t, clean)
    return (1.0 - t) * clean + t * noise


def nft_loss(
    velocity: Tensor,
    old_velocity: Tensor,
    clean: Tensor,
    noisy: Tensor,
    t: Tensor,
    optimal: Tensor,
    *,
    beta: float = 1.0,
    adv_clip_max: float = 5.0,
    adaptive_weight: bool = True,
) -> NftLoss:
    """A_max·[r·err(x̂⁺) + (1-r)·err(x̂⁻)]/β, with implicit policies on both sides of π_old.

    v⁺ = βv + (1-β)v_old, v⁻ = (1+β)v_old - βv; x̂± = x_t - t·v±; err(x̂) = mean((x̂ - x₀)²)/w with
    w = max(mean|x̂ - x₀|, 1e-5), no gradient, taken in float64.

    Args:
        velocity: (B, ...), of the model that trains.
        old_velocity: (B, ...), of the model that sampled; no gradient.
        clean: (B, ...), x₀.
        noisy: (B, ...), x_t of :func:`add_noise`.
        t: (B,) or ().
        optimal: (B,), r of :func:`optimality`.
        beta: β (`--diffusion-nft-beta`).
        adv_clip_max: A_max (`--diffusion-adv-clip-max`).
        adaptive_weight: Divide by w (`--no-diffusion-nft-adaptive-weight` switches it off).

    Raises:
        ValueError: If β is not positive.

    Paper: DiffusionNFT, arXiv:2509.16117.
    """
    if beta <= 0.0:
        raise ValueError(f"--diffusion-nft-beta must be positive, not {beta}")
    velocity, old, clean, noisy, t = at_least_float32(velocity, old_velocity.detach(), clean, noisy, t)
    t = per_sample(t, noisy)
    positive = _error(noisy - t * (beta * velocity + (1.0 - beta) * old), clean, adaptive_weight)
    negative = _error(noisy - t * ((1.0 + beta) * old - beta * velocity), clean, adaptive_weight)
    optimal = optimal.detach().to(positive.dtype)
    loss = adv_clip_max * (optimal * positive + (1.0 - optimal) * negative) / beta
    return NftLoss(loss, positive.detach(), negative.detach())


def velocity_distance(velocity: Tensor, ref_velocity: Tensor) -> Tensor:
    """mean((v - v_ref)²), (B,): the KL term of NFT, weighed with `--diffusion-kl-beta`."""
    velocity, reference = at_least_float32(velocity, ref_velocity.detach())
    return latent_mean((velocity - reference) ** 2)


def _error(prediction: Tensor, clean: Tensor, adaptive_weight: bool) -> Tensor:
    square = latent_mean((prediction - clean) ** 2)
    if not adaptive_weight:
        return square
    # Near convergence the distance is far below float32's resolution of its summands.
    with torch.no_grad():
        weight = latent_mean((prediction.double() - clean.double()).abs()).clamp(min=_MIN_WEIGHT)
    return square / weight.to(square.dtype)
