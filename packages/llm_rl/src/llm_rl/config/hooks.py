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
    """Replaces the generation of one sample."""
    custom_rm_path: str | None = None
    """The reward of a sample, or with --group-rm of a group. Goes before --rm-type."""
    custom_reward_post_process_path: str | None = None
    """Replaces the normalisation of rewards."""
    dynamic_sampling_filter_path: str | None = None
    """Keeps or rejects a scored group; rejected ones are replaced."""
    buffer_filter_path: str | None = None
    """Picks groups from the data source's buffer."""
    rollout_sample_filter_path: str | None = None
    """Marks samples to leave out of the loss."""
    rollout_all_samples_process_path: str | None = None
    """Sees all samples of a rollout, rejected ones too."""
    custom_convert_samples_to_train_data_path: str | None = None
    """Replaces the step from samples to training rows."""
    custom_loss_function_path: str | None = None
    """The loss, with --loss-type custom_loss."""
    custom_tis_function_path: str | None = None
    """Replaces truncated importance sampling, with --use-tis or --use-rs."""
    custom_pg_loss_reducer_function_path: str | None = None
    """Replaces the reduction of the policy loss."""
    custom_rollout_log_function_path: str | None = None
    """Logs training rollouts; returning True suppresses the default."""
    custom_eval_rollout_log_function_path: str | None = None
    """Logs evaluation rollouts; returning True suppresses the default."""
