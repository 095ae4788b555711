"""Flow-GRPO: the clipped policy-gradient loss over denoising steps, and the KL to a reference model.

The policy of a step is the Gaussian of `step_dynamics`. Its log-probs are means over the latent dimensions, so the
ratio of a pair stays near 1 and the clip range is small (1e-4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from diffusion_rl.algorithms.shapes import at_least_float32, latent_mean


@dataclass(frozen=True, eq=False)
class FlowGrpoLoss:
    """One loss a pair, and what happened on the way; everything is (B,).

    Attributes:
        loss: The clipped loss.
        ratio: ρ before clipping, no gradient.
        clipped: 1 where clipping changed the loss, no gradient.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def flow_grpo_loss(
    log_ratio: Tensor, advantages: Tensor, *, clip_range: float = 1e-4, adv_clip_max: float = 5.0
) -> FlowGrpoLoss:
    """max(-Aρ, -A·clip(ρ, 1 ± ε)) with A clamped to ±`adv_clip_max` and ρ = exp(log_ratio).

    Args:
        log_ratio: (B,), new minus old log-prob, or :func:`~diffusion_rl.algorithms.grpo_guard.guard_log_ratio`.
        advantages: (B,).
        clip_range: ε (`--diffusion-clip-range`).
        adv_clip_max: Bound of |A| (`--diffusion-adv-clip-max`).

    Raises:
        ValueError: For a range that is negative, or an advantage bound that is not positive.

    Paper: Flow-GRPO, arXiv:2505.05470.
    """
    if clip_range < 0.0 or adv_clip_max <= 0.0:
        raise ValueError(
            f"clip_range {clip_range} must not be negative and adv_clip_max {adv_clip_max} must be positive"
        )
    log_ratio, advantages = at_least_float32(log_ratio, advantages.detach())
    advantages = advantages.clamp(-adv_clip_max, adv_clip_max)
    ratio = torch.exp(log_ratio)
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1.0 - clip_range, 1.0 + clip_range)
    return FlowGrpoLoss(torch.maximum(plain, bounded), ratio.detach(), (bounded > plain).to(ratio.dtype))


def reference_kl(mean: Tensor, ref_mean: Tensor, std: Tensor) -> Tensor:
    """KL of two steps with the same std, per latent dimension: mean((μ - μ_ref)²)/(2·std²), (B,).

    Args:
        mean: (B, ...), of the model that trains.
        ref_mean: (B, ...), of the reference; no gradient flows into it.
        std: (B, 1, ..., 1) or (), positive.

    Paper: Flow-GRPO, arXiv:2505.05470.
    """
    mean, ref_mean, std = at_least_float32(mean, ref_mean.detach(), std)
    return latent_mean((mean - ref_mean) ** 2 / (2.0 * std**2))
