"""Your own Python at fixed places."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HooksConfig:
    """Your own Python at fixed places: `package.module.function`, checked before anything starts."""

    rollout_function_path: str | None = None
    """Replaces the whole rollout."""
    eval_function_path: str | None = None
    """Replaces the evaluation rollout."""
    custom_generate_function_path: str | None = None
    """Generates a microgroup: `async def generate(args, microgroup, sampling_params) -> list`."""
    custom_rm_path: str | None = None
    """The rewards of a microgroup: `[async] def rm(args, samples) -> list`. Goes before --rm-type."""
    custom_reward_post_process_path: str | None = None
    """Advantages from the rewards of a rollout: `(args, samples) -> (raw_rewards, advantages)`."""
    dynamic_sampling_filter_path: str | None = None
    """Keeps or rejects a scored group; rejected ones are replaced."""
    buffer_filter_path: str | None = None
    """Picks groups from the data source's buffer."""
    rollout_sample_filter_path: str | None = None
    """Marks samples to leave out of the loss."""
    rollout_all_samples_process_path: str | None = None
    """Sees all samples of a rollout, rejected ones too."""
    custom_rollout_log_function_path: str | None = None
    """Logs training rollouts; returning True suppresses the default."""
    custom_eval_rollout_log_function_path: str | None = None
    """Logs evaluation rollouts; returning True suppresses the default."""
    custom_expand_samples_to_train_pairs_path: str | None = None
    """Training rows of each sample: `(args, samples, rewards, raw_rewards) -> list of lists`."""
    custom_convert_samples_to_train_data_path: str | None = None
    """Training rows of each sample, advantages included: `(args, samples) -> list of lists`."""
    custom_prepare_train_batch_path: str | None = None
    """A micro-batch from training rows: `(args, rows, family, device) -> batch`."""
    custom_loss_function_path: str | None = None
    """The loss of pairs, with --loss-type custom_loss: `(args, batch, velocity, reduce) -> (loss, metrics)`."""
    sde_step_backend_path: str | None = None
    """Class with your own step dynamics for the trainer, in place of --diffusion-sde-type."""
    model_backend_path: str | None = None
    """Class that loads pipelines and components, in place of diffusers' from_pretrained."""
