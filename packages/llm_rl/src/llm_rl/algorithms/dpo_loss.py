"""Direct preference optimisation on pairs of responses."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import logsigmoid

from llm_rl.algorithms.segments import Segments
from shared_runtime.algorithms.masking import select


@dataclass(frozen=True, eq=False)
class DPOLoss:
    """Per pair (P,): the loss, and without gradient the implicit rewards β·(log π - log π_ref) of both sides."""

    loss: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


def dpo_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    segments: Segments,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> DPOLoss:
    """-(1 - ε)·log σ(β·h) - ε·log σ(-β·h), with h the chosen minus the rejected sum of log π - log π_ref.

    Samples come in pairs: sample 2i is the chosen, 2i + 1 the rejected response of pair i.

    Args:
        log_probs: (T,), of the policy.
        ref_log_probs: (T,), of the reference; no gradient flows into it.
        mask: (T,), non-zero marks the response's tokens.
        segments: Borders of the 2P samples.
        beta: Strength of the pull towards the reference.
        label_smoothing: ε, the assumed share of swapped labels (conservative DPO).

    Returns:
        Losses (P,), to be summed and divided by the number of pairs over all ranks.

    Raises:
        ValueError: For an odd number of samples, β not positive, or ε outside [0, 0.5).

    Paper: arXiv:2305.18290.
    """
    if segments.num_samples % 2:
        raise ValueError(f"DPO needs chosen and rejected responses in pairs, not {segments.num_samples} samples")
    if beta <= 0:
        raise ValueError(f"beta must be positive, not {beta}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be in [0, 0.5), not {label_smoothing}")
    rewards = beta * segments.sum(select(mask, log_probs - ref_log_probs.detach()))
    chosen, rejected = rewards[0::2], rewards[1::2]
    margin = chosen - rejected
    loss = -(1 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)
    return DPOLoss(loss, chosen.detach(), rejected.detach())
