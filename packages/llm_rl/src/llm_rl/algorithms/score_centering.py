"""Score centering: an off-policy policy gradient whose expectation under a constant reward is zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from llm_rl.algorithms.rollout_correction import bounded_exp
from shared_runtime.algorithms.masking import select

ImportanceSampling = Literal["none", "tis", "mis"]

MIN_TAIL = 1e-6
MAX_KL_LOG_RATIO = 40.0


@dataclass(frozen=True, eq=False)
class ScoreCenteringLoss:
    """Per token (T,), 0 at masked tokens; everything but the loss is without gradient.

    Attributes:
        loss: To be reduced with `reduction.masked_sum`.
        correction: The centering term Σ_H c·log p (`sc_correction`).
        train_head_mass: Σ_H p (`sc_train_head_mass`).
        rollout_head_mass: Σ_H q (`sc_rollout_head_mass`).
        tail_ratio: ρ (`sc_tail_ratio`).
        importance_weight: f(p/q) of the sampled token (`sc_importance_weight`).
    """

    loss: Tensor
    correction: Tensor
    train_head_mass: Tensor
    rollout_head_mass: Tensor
    tail_ratio: Tensor
    importance_weight: Tensor


def score_centering_loss(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    head_log_probs: Tensor,
    rollout_head_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    importance_sampling: ImportanceSampling = "none",
    tis_clip: float = 2.0,
    mis_low: float = 0.5,
    mis_high: float = 5.0,
) -> ScoreCenteringLoss:
    """REINFORCE with the expected score under the sampler subtracted, from the sampler's top-k candidates H.

    With p the trainer's and q the sampler's probabilities, f the importance weight (`none`: 1, `tis`: min(r, tis_clip),
    `mis`: r inside [mis_low, mis_high], else 0), and q modelled as ρ·p outside H:

        ρ = max(1 - Σ_H q, 1e-6) / max(1 - Σ_H p, 1e-6),  α = ρ·f(1/ρ)
        loss = -A·( sg f(p_t/q_t)·log p_t - Σ_H sg(q·f(p/q) - α·p)·log p )

    Args:
        log_probs: (T,), of the sampled token under the trainer.
        rollout_log_probs: (T,), of the sampled token under the distribution it was drawn from.
        head_log_probs: (T, K), of the candidates under the trainer (`candidates.candidate_log_probs`, or the
            support's of `candidates.support_log_probs` when the rollout filtered).
        rollout_head_log_probs: (T, K), of the candidates under the sampler; -inf in unused slots.
        advantages: (T,), centred in their group.
        mask: (T,), non-zero means trainable.
        importance_sampling: `--score-centering-is`.
        tis_clip: `--score-centering-tis-clip`.
        mis_low: `--score-centering-mis-low`.
        mis_high: `--score-centering-mis-high`.

    Raises:
        ValueError: For an unknown `importance_sampling` or bounds out of order.

    Paper: Score Centering Stabilizes Off-policy Reinforcement Learning, arXiv:2609.20807.
    """
    if importance_sampling not in get_args(ImportanceSampling):
        raise ValueError(
            f"importance_sampling must be one of {', '.join(get_args(ImportanceSampling))}, not {importance_sampling!r}"
        )
    if tis_clip <= 0 or not 0 <= mis_low <= mis_high:
        raise ValueError(f"bounds out of order: tis_clip {tis_clip}, mis_low {mis_low}, mis_high {mis_high}")

    def f(log_ratio: Tensor) -> Tensor:
        ratio = bounded_exp(log_ratio)
        if importance_sampling == "none":
            return torch.ones_like(ratio)
        if importance_sampling == "tis":
            return ratio.clamp(max=tis_clip)
        return select((ratio >= mis_low) & (ratio <= mis_high), ratio)

    used = (mask != 0)[:, None] & (rollout_head_log_probs > -torch.inf)
    log_p = select(used, head_log_probs)
    log_q = select(used, rollout_head_log_probs.detach())
    p, q = select(used, log_p.detach().exp()), select(used, log_q.exp())
    p_mass, q_mass = p.sum(dim=1), q.sum(dim=1)
    rho = (1 - q_mass).clamp(min=MIN_TAIL) / (1 - p_mass).clamp(min=MIN_TAIL)
    alpha = rho * f(-rho.log())
    coefficients = q * f(log_p.detach() - log_q) - alpha[:, None] * p
    correction = (coefficients * log_p).sum(dim=1)

    chosen = select(mask, log_probs)
    weight = select(mask, f(chosen.detach() - select(mask, rollout_log_probs.detach())))
    loss = -select(mask, advantages.detach()) * (weight * chosen - correction)
    return ScoreCenteringLoss(loss, correction.detach(), p_mass, q_mass, select(mask, rho), weight)


def usable_for_kl(
    log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, *, rollout_log_probs: Tensor | None = None
) -> Tensor:
    """Trainable tokens whose reference KL can be formed without overflow: finite, and log-ratios within ±40.

    Pass the result as the mask of `kl_estimate`; the share left out is `train/kl_invalid_fraction`.

    Args:
        log_probs: (T,), of the trainer over the full vocabulary.
        ref_log_probs: (T,), of the reference.
        mask: (T,), non-zero means trainable.
        rollout_log_probs: (T,), checked too when the KL is the unbiased one.

    Returns:
        bool (T,).
    """
    usable = mask != 0
    for other in (ref_log_probs, rollout_log_probs):
        if other is not None:
            # NaN compares false, and a difference of infinities is NaN or infinite.
            usable = usable & ((log_probs - other).detach().abs() <= MAX_KL_LOG_RATIO)
    return usable
