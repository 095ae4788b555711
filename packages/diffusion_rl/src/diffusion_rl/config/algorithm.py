"""The objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AlgorithmConfig:
    """The objective."""

    loss_type: Literal["policy_loss", "nft", "sft_loss", "custom_loss"] = "policy_loss"
    """Flow-GRPO, DiffusionNFT, flow matching on captioned pictures (their paths are the rows' labels), or
    --custom-loss-function-path on the pairs of Flow-GRPO."""
    disable_grpo_std_normalization: bool = False
    """Centre rewards without dividing by their standard deviation."""
    globalize_reward_mean: bool = False
    """Mean over the batch instead of the group."""
    globalize_reward_std: bool = False
    """Standard deviation over the batch instead of the group."""
    population_reward_std: bool = False
    """Divide by n in the standard deviation, as flow_grpo does."""
    diffusion_clip_range: float = 1e-4
    """Clip range of the ratio."""
    diffusion_adv_clip_max: float = 5.0
    """Bound of the advantages."""
    diffusion_grpo_guard: bool = False
    """Ratio with GRPO-Guard's correction; the engine returns its velocities for it."""
    diffusion_nft_beta: float = 1.0
    """How far the implicit policies of DiffusionNFT lie from the old one."""
    diffusion_nft_adaptive_weight: bool = True
    """Divide DiffusionNFT's errors by their own size."""
    diffusion_nft_timestep_strategy_path: str | None = None
    """`(args, num_steps, generator) -> steps` that each sample trains on. Unset: drop_random_steps."""
    diffusion_nft_num_dropped_timesteps: int = 0
    """Steps that the built-in strategies leave out."""
    use_ema: bool = False
    """Keep a moving average of the weights: the old policy of DiffusionNFT."""
    rollout_weights: Literal["actor", "ema"] = "actor"
    """Which weights the engines get."""
    ema_decay_init: float = 0.001
    """Decay during the flat period."""
    ema_decay_ramp: float = 0.001
    """Its increase an optimizer step after that, from zero."""
    ema_decay_max: float = 0.5
    """Its ceiling."""
    ema_decay_flat_steps: int = 0
    """Optimizer steps of the flat period."""
    diffusion_kl_beta: float = 0.0
    """Weight of the divergence from the reference."""
    ref_mode: Literal["none", "lora_base", "ref"] | None = None
    """The reference: none, the model without its adapters, or --ref-load. Unset: none without --diffusion-kl-beta,
    with it lora_base under --use-lora, else ref."""
    fsdp_flow_shift: float = 3.0
    """Shift of the noise levels that flow matching draws."""
    check_for_nan_in_loss_and_grad: bool = True
    """Stop at a gradient that is not finite."""
    debug_skip_optimizer_step: bool = False
    """Only measure how far trainer and engine differ."""
