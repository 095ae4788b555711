"""The objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AdvantageEstimator = Literal[
    "grpo", "gspo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "cispo"
]


@dataclass(frozen=True)
class AlgorithmConfig:
    """The objective."""

    advantage_estimator: AdvantageEstimator = "grpo"
    """How rewards become advantages."""
    disable_grpo_std_normalization: bool = False
    """Centre group rewards without dividing by their standard deviation."""
    normalize_advantages: bool = False
    """Whiten advantages over all trainable tokens of all ranks."""
    gamma: float = 1.0
    """Discount of the token-level returns."""
    lambd: float = 1.0
    """λ of generalised advantage estimation (ppo): 1 takes whole returns, 0 one-step differences."""
    loss_type: Literal["policy_loss", "score_centering", "sft_loss", "dpo_loss", "custom_loss"] = "policy_loss"
    """Clipped policy gradient, centred scores, supervised on given responses, preference pairs (DPO), or
    --custom-loss-function-path."""
    eps_clip: float = 0.2
    """Lower clip range of the ratio."""
    eps_clip_high: float | None = None
    """Upper clip range. Unset: --eps-clip."""
    eps_clip_c: float | None = None
    """Bound of the dual clip for negative advantages, above 1. Unset: none."""
    use_kl_loss: bool = False
    """Load the reference and measure the KL divergence to it."""
    kl_loss_coef: float = 0.0
    """Weight of the KL divergence in the loss; 0 only monitors."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k1"
    """Estimator of the KL divergence."""
    ref_update_interval: int | None = None
    """Rollouts after which the reference becomes the policy of that moment. Unset: it stays."""
    use_unbiased_kl: bool = False
    """Multiply the divergence by the ratio to the old policy, which makes it unbiased off-policy."""
    kl_coef: float = 0.0
    """Weight of the KL penalty in the token rewards of the REINFORCE++ estimators."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    observe_training_entropy: bool = False
    """Log the entropy when its weight is 0."""
    calculate_per_token_loss: bool = False
    """Average over all trainable tokens instead of over samples."""
    loss_length_divisor: float | None = None
    """Divide a sample's sum over its tokens by this instead of by their number (Dr. GRPO)."""
    use_opsm: bool = False
    """Off-policy sequence masking: drop the negative advantages of sequences that drifted from the old policy."""
    opsm_delta: float = 1e-4
    """Mean of log pi_old - log pi over a sequence above which it has drifted."""
    use_rollout_logprobs: bool = False
    """Take the engine's log-probs as the old policy's."""
    check_for_nan_in_loss_and_grad: bool = True
    """Stop at a loss or gradient that is not finite."""


@dataclass(frozen=True)
class PreferenceConfig:
    """Preference pairs, with --loss-type dpo_loss."""

    dpo_beta: float = 0.1
    """Strength of the pull towards the reference."""
    dpo_label_smoothing: float = 0.0
    """Assumed share of pairs whose preference is the wrong way round, below 0.5."""
    chosen_key: str = "chosen"
    """Where a row has the better response."""
    rejected_key: str = "rejected"
    """Where a row has the worse response."""
