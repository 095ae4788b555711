"""How much is sampled, how, and how it is scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shared_runtime.config import BatchConfig, Problems


@dataclass(frozen=True)
class DiffusionBatchConfig(BatchConfig):
    """How much is sampled and how it is consumed; a forward pass takes pairs of a sample and a timestep."""

    micro_batch_size_sample: int | None = None
    """Samples of a forward pass's tile. Goes with --micro-batch-size-tstep, in place of --micro-batch-size."""
    micro_batch_size_tstep: int | None = None
    """Timesteps of a forward pass's tile."""
    rollout_microgroup_size: int = 1
    """Images per engine request: one prompt encoded once."""


@dataclass(frozen=True)
class SamplingConfig:
    """How images are drawn."""

    diffusion_num_steps: int = 10
    """Denoising steps."""
    diffusion_num_sde_steps: int = 0
    """Stochastic steps that the step strategy picks."""
    diffusion_step_strategy_path: str | None = None
    """Which steps are stochastic and trained: sde_window, epoch_global_random_choice, or your own function.
    Unset: all."""
    diffusion_sde_window_range: str | None = None
    """`lo,hi` for sde_window. Unset: the whole schedule."""
    diffusion_sde_candidate_steps: str | None = None
    """`1,2,3` for epoch_global_random_choice."""
    diffusion_sde_type: Literal["sde", "cps", "ode"] = "sde"
    """Dynamics of the stochastic steps."""
    diffusion_noise_level: float = 0.7
    """Noise of the stochastic steps."""
    diffusion_guidance_scale: float = 4.0
    """Classifier-free guidance; 1 switches it off."""
    diffusion_true_cfg_scale: float | None = None
    """Takes its place in families that have one (Qwen-Image)."""
    diffusion_negative_prompt: str | None = None
    """Unset: the empty prompt."""
    diffusion_height: int = 512
    """Pixels."""
    diffusion_width: int = 512
    """Pixels."""
    diffusion_flow_shift: float | None = None
    """Shift of the schedule. Unset: the checkpoint's."""
    diffusion_log_prob_no_const: bool = False
    """Log-probs without constants."""
    diffusion_debug_mode: bool = False
    """Return the engine's velocities, and compare the trainer's with them."""
    rollout_max_in_flight: int | None = None
    """At most this many images are generated at once. Unset: all."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out prompts, without noise in the steps."""

    eval_prompt_data: tuple[str, ...] = ()
    """Pairs of name and path: `--eval-prompt-data shapes held_out.jsonl`."""
    eval_interval: int | None = None
    """Rollouts between evaluations. Unset: before the first and after the last rollout."""
    n_samples_per_eval_prompt: int = 1
    """Images per prompt."""
    diffusion_eval_num_steps: int | None = None
    """Denoising steps. Unset: as in the rollout."""
    eval_target: float | None = None
    """End the run when the first evaluation set scores at least this."""

    def sets(self) -> dict[str, str]:
        """Name to path."""
        words = self.eval_prompt_data
        return dict(zip(words[::2], words[1::2], strict=False))


@dataclass(frozen=True)
class RewardConfig:
    """Scoring."""

    rm_type: str | None = None
    """Built-in reward of images."""
    reward_key: str | None = None
    """Key of the training reward in rewards that are dicts. Unset: score."""
    group_rm: bool = False
    """Call the custom reward once for each group, when all its images are there, and not for each microgroup."""
    custom_rm_args: str | None = None
    """Text that --custom-rm-path reads in `args.custom_rm_args`."""
    on_reward_error: Literal["raise", "drop"] = "raise"
    """A reward that fails or is not finite stops the run, or drops its sample and counts it."""


@dataclass(frozen=True)
class MediaConfig:
    """Pictures of training rollouts: grids in the run's `media`, and images for W&B and TensorBoard."""

    wandb_log_num_images: int = 0
    """Images of a rollout that are logged, the first ones, whichever of the three are on. 0: none."""
    wandb_log_image_interval: int = 1
    """Rollouts between logged ones."""

    def check(self, problems: Problems) -> None:
        """Note numbers that mean nothing."""
        problems.not_negative(wandb_log_num_images=self.wandb_log_num_images)
        problems.positive(wandb_log_image_interval=self.wandb_log_image_interval)
