"""Advantages of the estimators that need no critic.

Rewards come in already relative to their group (`shared_runtime.algorithms.groups`) where the estimator wants that:
`grpo`, `gspo`, `cispo` centred and divided by the std, `reinforce_plus_plus_baseline` centred, `rloo` against the
other members, `reinforce_plus_plus` raw. All of them are constants for the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llm_rl.algorithms.scan import discounted_suffix_sum
from llm_rl.algorithms.segments import Segments
from shared_runtime.algorithms.masking import select


def broadcast_advantages(rewards: Tensor, mask: Tensor, segments: Segments) -> Tensor:
    """`grpo`, `gspo`, `cispo`, `rloo`: A_t = r̂ of the sample at each trainable token.

    Args:
        rewards: (B,), group-relative.
        mask: (T,), non-zero means trainable.
        segments: Borders of the samples.

    Returns:
        (T,), 0 at masked tokens.

    Papers: GRPO, arXiv:2402.03300; GSPO, arXiv:2507.18071; CISPO, arXiv:2506.13585; RLOO, arXiv:2402.14740.
    """
    return select(mask, segments.expand(rewards))


def token_rewards(
    rewards: Tensor, mask: Tensor, segments: Segments, *, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """-kl_coef · KL_t at each trainable token, plus the sample's reward at its last trainable one; (T,).

    A sample without trainable tokens has nowhere to put its reward and gets none. `kl` itself is left as it is, so what
    is logged of it does not change.
    """
    out = torch.where(segments.last(mask), segments.expand(rewards), torch.zeros((), dtype=rewards.dtype))
    if kl is not None and kl_coef != 0.0:
        out = out - kl_coef * select(mask, kl.detach())
    return out


def reinforce_plus_plus_returns(
    rewards: Tensor,
    mask: Tensor,
    segments: Segments,
    *,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
) -> Tensor:
    """`reinforce_plus_plus`: G_t = r_t + gamma · G_{t+1} over the trainable tokens, r_t of :func:`token_rewards`.

    Whiten the result over the whole batch (`whitening.whiten`) to get advantages.

    Args:
        rewards: (B,), raw.
        mask: (T,), non-zero means trainable.
        segments: Borders of the samples.
        kl: (T,), an estimate of KL(π‖π_ref) at each token.
        kl_coef: β.
        gamma: Discount.

    Returns:
        (T,), 0 at masked tokens.

    Paper: REINFORCE++, arXiv:2501.03262.
    """
    per_token = token_rewards(rewards, mask, segments, kl=kl, kl_coef=kl_coef)
    return discounted_suffix_sum(per_token, mask, segments, gamma)


def reinforce_plus_plus_baseline_advantages(
    rewards: Tensor, mask: Tensor, segments: Segments, *, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """`reinforce_plus_plus_baseline`: A_t = r̂ - β · KL_t, r̂ centred in its group; whiten the result over the batch.

    Arguments and result as :func:`reinforce_plus_plus_returns`.

    Paper: REINFORCE++, arXiv:2501.03262.
    """
    advantages = broadcast_advantages(rewards, mask, segments)
    if kl is not None and kl_coef != 0.0:
        advantages = advantages - kl_coef * select(mask, kl.detach())
    return advantages
