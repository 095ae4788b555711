"""The policy-gradient losses: clipped, dual clip, GSPO, CISPO, and OPSM's mask.

They work in two steps. A *log-ratio* log π_θ - log π_old is formed a token or a sequence at a time; a loss turns it,
with advantages, into the loss of each token. Old log-probs and advantages carry no gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from llm_rl.algorithms.segments import Segments
from shared_runtime.algorithms.masking import select

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """A loss per token and what happened on the way; everything is (T,) and 0 at masked tokens.

    Attributes:
        loss: To be reduced with `reduction.masked_sum`.
        clipped: 1 where clipping changed the loss (`train/pg_clipfrac`), no gradient.
        dual_clipped: 1 where the dual clip bounded it, no gradient.
        ratio: π_θ/π_old before clipping, no gradient.
    """

    loss: Tensor
    clipped: Tensor
    dual_clipped: Tensor
    ratio: Tensor


def token_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """log π_θ - log π_old of each trainable token (T,), 0 elsewhere."""
    return select(mask, log_probs - old_log_probs.detach())


def sequence_log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, segments: Segments) -> Tensor:
    """GSPO's log-ratio: the mean of the token log-ratios over each sample's trainable tokens.

    Σ m·(log π_θ - log π_old) / max(Σ m, 1), repeated over the sample's tokens, 0 at masked ones; (T,).

    Paper: GSPO, arXiv:2507.18071.
    """
    mean = segments.mean(token_log_ratio(log_probs, old_log_probs, mask), mask)
    return select(mask, segments.expand(mean))


def clipped_policy_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> PolicyLoss:
    """PPO's clipped loss with separate bounds and the optional dual clip.

    With ρ = exp(clamp(log_ratio, ±20)): loss = max(-ρA, -clip(ρ, 1 - eps_clip, 1 + eps_clip_high)·A). With
    `eps_clip_c` = c, where A < 0: min(loss, -cA), which bounds how hard an unlikely token is pushed away.

    Args:
        log_ratio: (T,), of :func:`token_log_ratio` (PPO, GRPO) or :func:`sequence_log_ratio` (GSPO).
        advantages: (T,).
        mask: (T,), non-zero means trainable.
        eps_clip: Lower bound.
        eps_clip_high: Upper bound, default `eps_clip`.
        eps_clip_c: Dual clip, greater than 1.

    Raises:
        ValueError: For a clip out of range.

    Papers: PPO, arXiv:1707.06347; dual clip, arXiv:1912.09729; asymmetric clip (DAPO), arXiv:2503.14476.
    """
    low, high = _clip_bounds(eps_clip, eps_clip_high)
    if eps_clip_c is not None and eps_clip_c <= 1:
        raise ValueError(f"eps_clip_c must be greater than 1, not {eps_clip_c}")
    advantages = select(mask, advantages.detach())
    ratio = _ratio(select(mask, log_ratio))
    plain = -ratio * advantages
    bounded = -ratio.clamp(low, high) * advantages
    loss = torch.maximum(plain, bounded)
    clipped = (bounded > plain).to(loss.dtype)
    dual_clipped = torch.zeros_like(clipped)
    if eps_clip_c is not None:
        floor = -eps_clip_c * advantages
        hit = (advantages < 0) & (floor < loss)
        loss = torch.where(hit, floor, loss)
        dual_clipped = hit.to(loss.dtype)
    return PolicyLoss(loss, clipped, dual_clipped, ratio.detach())


def cispo_loss(
    log_probs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
) -> PolicyLoss:
    """CISPO: -sg(clip(ρ, 1 - eps_clip, 1 + eps_clip_high))·A·log π_θ. Every token keeps a gradient, clipped or not.

    Args:
        log_probs: (T,), the gradient's way.
        log_ratio: (T,), of :func:`token_log_ratio`.
        advantages: (T,).
        mask: (T,), non-zero means trainable.
        eps_clip: Lower bound; 1 or more switches it off.
        eps_clip_high: Upper bound, default `eps_clip`.

    Raises:
        ValueError: For a clip out of range.

    Paper: MiniMax-M1, arXiv:2506.13585.
    """
    low, high = _clip_bounds(eps_clip, eps_clip_high)
    advantages = select(mask, advantages.detach())
    ratio = _ratio(select(mask, log_ratio)).detach()
    weight = ratio.clamp(low, high)
    loss = -weight * advantages * select(mask, log_probs)
    return PolicyLoss(loss, (weight != ratio).to(loss.dtype), torch.zeros_like(ratio), ratio)


def opsm_keep(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, segments: Segments, *, delta: float
) -> Tensor:
    """Off-policy sequence masking: drop what has a negative advantage in a sequence that drifted too far.

    A token is dropped where A < 0 and its sequence's mean of log π_old - log π_θ exceeds `delta`. Multiply the loss
    by the result; the denominators stay.

    Returns:
        (T,) of 0 and 1, no gradient, 1 at masked tokens.

    Paper: DeepSeek-V3.2, arXiv:2512.02556.
    """
    drift = -sequence_log_ratio(log_probs.detach(), old_log_probs, mask, segments)
    drop = (select(mask, advantages.detach()) < 0) & (drift > delta)
    return (~drop).to(log_probs.dtype)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clip_bounds(eps_clip: float, eps_clip_high: float | None) -> tuple[float, float]:
    high = eps_clip if eps_clip_high is None else eps_clip_high
    if eps_clip < 0 or high < 0:
        raise ValueError(f"clip ranges must not be negative: eps_clip {eps_clip}, eps_clip_high {eps_clip_high}")
    return 1 - eps_clip, 1 + high
