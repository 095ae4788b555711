"""What the FSDP trainer can be told: plain values under the names of the flags. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from llm_rl.config.correction import CorrectionConfig, check_correction
from llm_rl.config.score_centering import ScoreCenteringConfig
from shared_runtime.config import Problems
from shared_runtime.training.settings import FsdpSettings

AdvantageEstimator = Literal[
    "grpo", "gspo", "cispo", "rloo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
]


@dataclass(frozen=True)
class FsdpTrainerSettings(ScoreCenteringConfig, CorrectionConfig, FsdpSettings):
    """Settings of one trainer, the same on every rank. Hooks must be importable functions when ranks are processes."""

    # Precision and attention
    train_dtype: str = "bf16"
    """Dtype of forward and backward: bf16, fp32 or fp64."""
    keep_fp32_master: bool = True
    """Keep weights and optimizer state in fp32 whatever the compute dtype."""
    publish_dtype: str | None = None
    """Dtype of published and exported weights. Unset: `train_dtype`."""
    attn_implementation: str | None = None
    """Attention of transformers; sdpa and eager pad. Unset: packed, with flash_attention_2 on a GPU that has it."""

    # Adapters
    lora_rank: int = 0
    """Rank of the adapters that train in the model's place; 0 trains the model."""
    lora_alpha: int = 16
    """Adapters count alpha / rank times."""
    target_modules: tuple[str, ...] = ()
    """Layers to adapt; see `llm_rl.models.lora_targets`."""
    exclude_modules: tuple[str, ...] = ()
    """Layers to leave out of them."""
    lora_adapter_path: Path | None = None
    """Adapters to continue from."""

    # Objective
    loss_type: Literal["policy_loss", "score_centering", "sft_loss", "dpo_loss", "custom_loss"] = "policy_loss"
    """What is minimised."""
    advantage_estimator: AdvantageEstimator = "grpo"
    """How rewards become advantages, and with gspo and cispo the form of the loss."""
    normalize_advantages: bool = False
    """Whiten advantages over all trainable tokens of the rollout and all ranks."""
    gamma: float = 1.0
    """Discount of the token-level returns."""
    lambd: float = 1.0
    """λ of generalised advantage estimation, with the estimator ppo."""
    rollout_temperature: float = 1.0
    """All log-probs are taken at this temperature (supervised training and DPO: at 1)."""
    eps_clip: float = 0.2
    """Lower clip range."""
    eps_clip_high: float | None = None
    """Upper clip range. Unset: `eps_clip`."""
    eps_clip_c: float | None = None
    """Bound of the dual clip. Unset: none."""
    use_kl_loss: bool = False
    """Load the reference and measure the KL divergence to it."""
    kl_loss_coef: float = 0.0
    """Its weight in the loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k1"
    """Estimator of the divergence, in the loss and in the reward."""
    ref_update_interval: int | None = None
    """Rollouts after which the reference becomes the policy of that moment. Unset: it stays."""
    use_unbiased_kl: bool = False
    """Multiply the divergence in the loss by the ratio to the old policy."""
    kl_coef: float = 0.0
    """Weight of the KL penalty in the token rewards of the REINFORCE++ estimators."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    observe_training_entropy: bool = False
    """Measure the entropy when its weight is 0."""
    calculate_per_token_loss: bool = False
    """Average over trainable tokens instead of over samples."""
    loss_length_divisor: float | None = None
    """Divide a sample's sum over its tokens by this. Unset: by their number."""
    use_opsm: bool = False
    """Drop the negative advantages of sequences that drifted from the old policy."""
    opsm_delta: float = 1e-4
    """Mean of log π_old - log π over a sequence above which it has drifted."""
    use_rollout_logprobs: bool = False
    """Take the engine's log-probs as the old policy's."""

    # Critic, with the estimator ppo
    critic_load: Path | None = None
    """Directory of its initial weights. Unset: `hf_checkpoint`. A value head that isn't there starts at zero."""
    critic_lr: float | None = None
    """Its peak learning rate. Unset: `lr`."""
    critic_lr_warmup_iters: int = 0
    """Optimizer steps of its linear warm-up."""
    num_critic_only_steps: int = 0
    """First rollouts, in which only the critic learns."""
    value_clip: float = 0.2
    """Largest change of a prediction that still improves the value loss."""

    # On-policy distillation
    use_opd: bool = False
    """Subtract the reverse KL to a teacher from the advantages."""
    opd_kl_coef: float = 1.0
    """Its weight."""
    opd_teacher_load: Path | None = None
    """Directory of the teacher. Unset: rows bring the log-probs of a teacher elsewhere."""
    opd_log_prob_top_k: int = 0
    """Likely tokens compared at each position; 0 compares the sampled one."""
    opd_top_k_strategy: Literal["only-student", "only-teacher", "intersection", "union", "xor"] = "only-student"
    """Which likely tokens."""
    opd_reward_weight_mode: Literal["student_p", "teacher_p", "none"] = "student_p"
    """What weighs them."""

    # Preference pairs, with dpo_loss
    dpo_beta: float = 0.1
    """Strength of DPO's pull towards the reference."""
    dpo_label_smoothing: float = 0.0
    """Assumed share of pairs whose preference is the wrong way round."""

    # Hooks
    custom_tis_function: Callable[..., Any] | None = None
    """`(train_log_probs, rollout_log_probs, mask, segments) -> Correction`. Unset: truncated importance sampling."""
    custom_loss: Callable[..., Any] | None = None
    """`(args, batch, logits, reduce) -> (loss, metrics)`, with `loss_type` custom_loss; see `loss.custom_loss`."""
    pg_loss_reducer: Callable[..., Any] | None = None
    """`(total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> (flat losses -> scalar)`."""
    hook_args: Any = None
    """First argument of hooks: the run's flags. Unset: these settings."""

    @property
    def use_lora(self) -> bool:
        """Whether adapters train."""
        return self.lora_rank > 0

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs of a frozen reference are needed."""
        return self.use_kl_loss or self.kl_coef > 0 or self.loss_type == "dpo_loss"

    @property
    def policy_gradient(self) -> bool:
        """Whether advantages are trained on."""
        return self.loss_type in ("policy_loss", "score_centering")

    @property
    def use_critic(self) -> bool:
        """Whether a value model is trained too."""
        return self.advantage_estimator == "ppo" and self.loss_type == "policy_loss"

    @property
    def temperature(self) -> float:
        """Temperature of all log-probs."""
        return 1.0 if self.loss_type in ("sft_loss", "dpo_loss") else self.rollout_temperature

    def check(self) -> None:
        """Refuse combinations that can't work.

        Raises:
            ValueError: With the names of what doesn't fit.
        """
        super().check()
        if (self.loss_type == "custom_loss") != (self.custom_loss is not None):
            raise ValueError("loss_type custom_loss and a custom loss function go together")
        if self.use_opd and self.loss_type != "policy_loss":
            raise ValueError(f"use_opd changes advantages, which loss_type {self.loss_type} does not read")
        if self.rollout_temperature <= 0:
            raise ValueError(f"rollout_temperature must be above 0, got {self.rollout_temperature}")
        if self.kl_loss_coef > 0 and not self.use_kl_loss:
            raise ValueError(f"kl_loss_coef {self.kl_loss_coef} has no effect without use_kl_loss")
        if self.kl_coef > 0 and not self.advantage_estimator.startswith("reinforce_plus_plus"):
            raise ValueError(f"kl_coef penalises the token rewards of REINFORCE++, not of {self.advantage_estimator}")
        problems = Problems()
        check_correction(
            self,
            problems,
            loss_type=self.loss_type,
            use_rollout_logprobs=self.use_rollout_logprobs,
            function=None if self.custom_tis_function is None else "custom_tis_function",
        )
        problems.raise_if_any()
