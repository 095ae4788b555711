"""What the FSDP trainer can be told: plain values under the names of the flags. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shared_runtime.training.settings import FsdpSettings

Dtype = Literal["fp32", "bf16", "fp64"]


@dataclass(frozen=True)
class FsdpTrainerSettings(FsdpSettings):
    """Settings of one trainer, the same on every rank. Hooks must be importable when ranks are processes."""

    diffusion_model_family: Any = None
    """Family of the checkpoint, or its name. Unset: what the checkpoint's name says."""
    model_backend: Any = None
    """A class with the methods of `models.loading.ModelBackend` that loads models."""
    update_weight_target_module: str = "transformer"
    """The component that trains and is published."""

    # Precision
    fsdp_master_dtype: Dtype = "fp32"
    """Dtype of the sharded weights and the optimizer state."""
    fsdp_reduce_dtype: Dtype = "fp32"
    """Dtype in which gradients are summed over ranks."""
    diffusion_forward_dtype: Dtype = "bf16"
    """Dtype of forward and backward."""
    publish_dtype: Dtype | None = None
    """Dtype of published weights. Unset: `diffusion_forward_dtype`."""
    param_dtype_patterns: tuple[str, ...] = ()
    """`pattern=dtype`: parameters that compute in a dtype of their own, after the family's."""
    weight_decay: float = 0.0
    """Decoupled; biases and norms are left out."""
    adam_beta2: float = 0.999
    """Second moment's decay."""

    # Adapters
    use_lora: bool = False
    """Train low-rank adapters; the model itself is frozen."""
    lora_rank: int = 64
    """Rank of the adapters."""
    lora_alpha: int = 64
    """Adapters count alpha / rank times."""
    lora_target_modules: tuple[str, ...] = ()
    """Ends of the names of adapted layers. Unset: the family's."""
    lora_init_weights: Literal["gaussian", "kaiming-uniform"] = "gaussian"
    """Start of the adapters' first matrix."""
    lora_adapter_path: Path | None = None
    """Adapters to continue from."""
    ref_lora_adapter_path: Path | None = None
    """Adapters that are merged into the reference."""

    # What was sampled
    diffusion_height: int = 512
    """Pixels."""
    diffusion_width: int = 512
    """Pixels."""
    diffusion_guidance_scale: float = 4.0
    """Classifier-free guidance, as in the rollout."""
    diffusion_true_cfg_scale: float | None = None
    """Takes its place in families that have one."""
    diffusion_sde_type: str = "sde"
    """Dynamics of the stochastic steps."""
    diffusion_noise_level: float = 0.7
    """η of the rollout."""
    diffusion_log_prob_no_const: bool = False
    """Log-probs without constants, as in the rollout."""
    sde_step_backend: Any = None
    """A class with the methods of `StepDynamics` in place of `diffusion_sde_type`."""

    # Objective
    loss_type: Literal["policy_loss", "nft", "sft_loss", "custom_loss"] = "policy_loss"
    """Flow-GRPO, DiffusionNFT, flow matching on pictures, or `custom_loss` on pairs."""
    custom_loss: Callable[..., Any] | None = None
    """`(args, batch, velocity, reduce) -> (loss, metrics)`, with `loss_type` custom_loss; see `loss.custom_loss`."""
    prepare_train_batch: Callable[..., Any] | None = None
    """`(args, rows, family, device) -> batch` in place of `batch.collate_pairs` or `collate_pictures`."""
    hook_args: Any = None
    """First argument of these functions. Unset: these settings."""
    diffusion_nft_beta: float = 1.0
    """How far the implicit policies of DiffusionNFT lie from the old one."""
    diffusion_nft_adaptive_weight: bool = True
    """Divide DiffusionNFT's errors by their own size."""
    diffusion_clip_range: float = 1e-4
    """Clip range of the ratio."""
    diffusion_adv_clip_max: float = 5.0
    """Bound of the advantages."""
    diffusion_kl_beta: float = 0.0
    """Weight of the divergence from the reference."""
    diffusion_grpo_guard: bool = False
    """Ratio with GRPO-Guard's correction."""
    use_ema: bool = False
    """Keep a moving average of the weights."""
    rollout_weights: Literal["actor", "ema"] = "actor"
    """Which weights are published."""
    ema_decay_init: float = 0.001
    """Decay during the flat period."""
    ema_decay_ramp: float = 0.001
    """Its increase an optimizer step after that, from zero."""
    ema_decay_max: float = 0.5
    """Its ceiling."""
    ema_decay_flat_steps: int = 0
    """Optimizer steps of the flat period."""
    ref_mode: Literal["none", "lora_base", "ref"] = "none"
    """The reference: none, this model without its adapters, or a frozen one that is loaded."""
    fsdp_flow_shift: float = 3.0
    """Shift of the noise levels of supervised training."""
    debug_skip_optimizer_step: bool = False
    """Only measure: no backward, no optimizer step."""

    def check(self) -> None:
        """Refuse combinations that can't work.

        Raises:
            ValueError: With the names of what doesn't fit.
        """
        super().check()
        if self.diffusion_kl_beta > 0 and self.ref_mode == "none":
            raise ValueError(f"diffusion_kl_beta {self.diffusion_kl_beta} has no effect with ref_mode none")
        if self.ref_mode == "lora_base" and not self.use_lora:
            raise ValueError("ref_mode lora_base needs use_lora")
        if (self.loss_type == "nft" or self.rollout_weights == "ema") and not self.use_ema:
            raise ValueError("loss_type nft and rollout_weights ema need use_ema")
        if (self.loss_type == "custom_loss") != (self.custom_loss is not None):
            raise ValueError("loss_type custom_loss and a custom loss function go together")
        if self.loss_type == "policy_loss" and self.diffusion_sde_type == "ode" and self.sde_step_backend is None:
            raise ValueError("diffusion_sde_type ode has no log-probs, which the policy loss needs")
