"""Everything a diffusion run can be told, as typed groups. What stands here is the help text. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from rewards import known_rm_types
from shared_runtime.config import (
    BatchConfig,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    DebugConfig,
    OptimizerConfig,
    Problems,
    RunConfig,
    TrackingConfig,
    flat_args,
    resolve_batch,
)
from shared_runtime.config.problems import nearest


@dataclass(frozen=True)
class ModelConfig:
    """The pipeline and who trains and serves it."""

    hf_checkpoint: Path | None = None
    """diffusers directory of the pipeline."""
    diffusion_model_family: str | None = None
    """Family of the pipeline: sd3 or qwen_image. Unset: what the directory's name says."""
    diffusion_task: str = "t2i"
    """Task of the family to train on."""
    ref_load: Path | None = None
    """diffusers directory of the frozen reference. Unset: --hf-checkpoint."""
    train_backend: Literal["fsdp"] = "fsdp"
    """Trainer backend."""
    rollout_engine: Literal["local"] = "local"
    """Rollout engine; local runs the pipeline's components in a worker process."""
    update_weight_target_module: str = "transformer"
    """The component that trains and is published."""
    update_weight_buffer_size: int = 512 * 1024 * 1024
    """Largest bucket of a weight update, in bytes."""
    check_weight_update_equal: bool = False
    """Compare a checksum of every tensor after every update."""


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
    on_reward_error: Literal["raise", "drop"] = "raise"
    """A reward that fails or is not finite stops the run, or drops its sample and counts it."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """The objective."""

    loss_type: Literal["policy_loss", "nft"] = "policy_loss"
    """Flow-GRPO, or DiffusionNFT."""
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
    ref_mode: Literal["none", "ref"] | None = None
    """The reference: none, or --ref-load. Unset: ref with --diffusion-kl-beta, else none."""
    check_for_nan_in_loss_and_grad: bool = True
    """Stop at a gradient that is not finite."""
    debug_skip_optimizer_step: bool = False
    """Only measure how far trainer and engine differ."""


@dataclass(frozen=True)
class DiffusionFsdpConfig:
    """The FSDP2 trainer."""

    dp_replicate_size: int = 1
    """Replicas of the sharded model (hybrid sharding); must divide the number of trainer ranks."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    fsdp_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    fsdp_cpu_backend: str = "gloo"
    """Process-group backend for CPU tensors."""
    fsdp_master_dtype: Literal["fp32", "bf16"] = "fp32"
    """Sharded weights and optimizer state."""
    fsdp_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Gradient reduce-scatter."""
    diffusion_forward_dtype: Literal["bf16", "fp32"] = "bf16"
    """The transformer's forward, in trainer and local engine."""


@dataclass(frozen=True)
class HooksConfig:
    """Your own Python at fixed places: `package.module.function`, checked before anything starts."""

    rollout_function_path: str | None = None
    """Replaces the whole rollout."""
    eval_function_path: str | None = None
    """Replaces the evaluation rollout."""
    custom_rm_path: str | None = None
    """The rewards of a group: `[async] def rm(args, samples) -> list`. Goes before --rm-type."""
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
    sde_step_backend_path: str | None = None
    """Class with your own step dynamics for the trainer, in place of --diffusion-sde-type."""


@dataclass(frozen=True)
class TrainConfig:
    """A whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: DiffusionBatchConfig = field(default_factory=DiffusionBatchConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(weight_decay=0.0, adam_beta2=0.999))
    fsdp: DiffusionFsdpConfig = field(default_factory=DiffusionFsdpConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    hooks: HooksConfig = field(default_factory=HooksConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.cluster.actor_num_nodes * self.cluster.actor_num_gpus_per_node


def resolve(config: TrainConfig) -> TrainConfig:
    """Fill in derived values and check everything that can be told without reading a file.

    Raises:
        ConfigError: With every problem found.
    """
    problems = Problems()
    algorithm = config.algorithm
    ref_mode = algorithm.ref_mode or ("ref" if algorithm.diffusion_kl_beta > 0 else "none")
    config = dataclasses.replace(
        config,
        batch=resolve_batch(config.batch, problems),
        algorithm=dataclasses.replace(algorithm, ref_mode=ref_mode),
    )
    config.cluster.check(problems)
    config.optimizer.check(problems)
    config.checkpoint.check(problems)
    config.tracking.check(problems)
    config.debug.check(problems)
    _check_sources(config, problems)
    _check_batch(config, problems)
    _check_sampling(config, problems)
    _check_evaluation(config, problems)
    _check_algorithm(config, problems)
    problems.raise_if_any()
    return config


def hook_args(config: TrainConfig) -> SimpleNamespace:
    """All settings in one flat namespace, lists of steps as numbers: what hooks and step strategies receive."""
    args = flat_args(config)
    args.diffusion_sde_window_range = numbers(config.sampling.diffusion_sde_window_range)
    args.diffusion_sde_candidate_steps = numbers(config.sampling.diffusion_sde_candidate_steps)
    return args


def numbers(text: str | None) -> tuple[int, ...] | None:
    """`"1,2,3"` as numbers.

    Raises:
        ValueError: If it isn't a list of whole numbers.
    """
    return None if text is None else tuple(int(part) for part in text.split(","))


def _check_sources(config: TrainConfig, problems: Problems) -> None:
    model, data, debug = config.model, config.data, config.debug
    if model.hf_checkpoint is None:
        problems.add("--hf-checkpoint is missing: the diffusers directory of the pipeline to train")
    if data.prompt_data is None and data.data_source_path is None:
        problems.add("--prompt-data is missing: a JSONL or parquet file of prompts (or --data-source-path)")
    problems.positive(update_weight_buffer_size=model.update_weight_buffer_size)
    if config.run.in_process and config.world_size > 1:
        problems.add(f"--in-process is one trainer rank, but the layout asks for {config.world_size}")
    if debug.save_debug_rollout_data or debug.load_debug_rollout_data:
        problems.add("--save-debug-rollout-data and --load-debug-rollout-data can't hold images and latents yet")
    reward = config.reward.rm_type
    if reward is None and config.hooks.custom_rm_path is None:
        problems.add("no reward: give --rm-type or --custom-rm-path")
    if reward is not None and reward not in known_rm_types():
        problems.add(f"--rm-type {reward} is unknown{nearest(reward, known_rm_types())}")


def _check_batch(config: TrainConfig, problems: Problems) -> None:
    batch, sizes = config.batch, (config.batch.micro_batch_size_sample, config.batch.micro_batch_size_tstep)
    problems.positive(
        micro_batch_size_sample=sizes[0],
        micro_batch_size_tstep=sizes[1],
        rollout_microgroup_size=batch.rollout_microgroup_size,
    )
    if (sizes[0] is None) != (sizes[1] is None):
        problems.add("--micro-batch-size-sample and --micro-batch-size-tstep go together")
    if batch.use_dynamic_batch_size or batch.max_tokens_per_gpu is not None or batch.balance_data:
        problems.add(
            "--use-dynamic-batch-size, --max-tokens-per-gpu and --balance-data count tokens, and images of one size "
            "have as many each: use --micro-batch-size, or --micro-batch-size-sample and --micro-batch-size-tstep"
        )
    samples, ranks = batch.global_batch_size, config.world_size
    if samples is not None and ranks > 0 and samples % ranks:
        problems.add(f"--global-batch-size {samples} can't be split evenly over {ranks} trainer ranks")
    elif samples is not None and ranks > 0 and sizes[0] is not None and sizes[0] > 0 and samples // ranks % sizes[0]:
        problems.add(
            f"--micro-batch-size-sample {sizes[0]} does not divide the {samples // ranks} samples that each of {ranks} "
            f"ranks trains in a step (--global-batch-size {samples})"
        )
    tstep, trained = sizes[1], config.sampling.diffusion_num_sde_steps or config.sampling.diffusion_num_steps
    if config.algorithm.loss_type == "nft":
        trained = config.sampling.diffusion_num_steps - config.algorithm.diffusion_nft_num_dropped_timesteps
    if tstep is not None and tstep > 0 and trained % tstep:
        problems.add(f"--micro-batch-size-tstep {tstep} does not divide the {trained} trained steps of a trajectory")
    replicas = config.fsdp.dp_replicate_size
    problems.positive(dp_replicate_size=replicas)
    if replicas > 0 and ranks % replicas:
        problems.add(f"--dp-replicate-size {replicas} does not divide the {ranks} trainer ranks")


def _check_sampling(config: TrainConfig, problems: Problems) -> None:
    sampling = config.sampling
    problems.positive(
        diffusion_num_steps=sampling.diffusion_num_steps,
        diffusion_height=sampling.diffusion_height,
        diffusion_width=sampling.diffusion_width,
        diffusion_flow_shift=sampling.diffusion_flow_shift,
        rollout_max_in_flight=sampling.rollout_max_in_flight,
    )
    problems.not_negative(
        diffusion_num_sde_steps=sampling.diffusion_num_sde_steps,
        diffusion_guidance_scale=sampling.diffusion_guidance_scale,
    )
    if config.algorithm.loss_type == "nft":
        pass  # it trains on images, however they were drawn
    elif sampling.diffusion_sde_type == "ode" and config.hooks.sde_step_backend_path is None:
        problems.add("--diffusion-sde-type ode has no log-probs, which Flow-GRPO needs: use sde or cps")
    problems.require(
        sampling.diffusion_noise_level > 0 or config.algorithm.loss_type == "nft",
        f"--diffusion-noise-level must be above 0, got {sampling.diffusion_noise_level}: without noise there is "
        "nothing that Flow-GRPO could reinforce",
    )
    ranges: dict[str, Any] = {
        "--diffusion-sde-window-range": sampling.diffusion_sde_window_range,
        "--diffusion-sde-candidate-steps": sampling.diffusion_sde_candidate_steps,
    }
    for flag, text in ranges.items():
        try:
            found = numbers(text)
        except ValueError:
            problems.add(f"{flag} must be whole numbers with commas between them, got {text!r}")
            continue
        if flag.endswith("range") and found is not None and len(found) != 2:
            problems.add(f"{flag} must be lo,hi, got {text!r}")


def _check_evaluation(config: TrainConfig, problems: Problems) -> None:
    evaluation, words = config.evaluation, config.evaluation.eval_prompt_data
    problems.positive(
        eval_interval=evaluation.eval_interval,
        n_samples_per_eval_prompt=evaluation.n_samples_per_eval_prompt,
        diffusion_eval_num_steps=evaluation.diffusion_eval_num_steps,
    )
    if len(words) % 2:
        problems.add(f"--eval-prompt-data takes pairs of name and path, got {len(words)} words: {' '.join(words)}")
    elif len(evaluation.sets()) < len(words) // 2:
        problems.add("--eval-prompt-data: two sets have the same name")
    if (evaluation.eval_interval or evaluation.eval_target is not None) and not words:
        problems.add("--eval-interval and --eval-target need --eval-prompt-data")


def _check_algorithm(config: TrainConfig, problems: Problems) -> None:
    algorithm, group = config.algorithm, config.batch.n_samples_per_prompt or 1
    if group < 2 and not algorithm.globalize_reward_mean:
        problems.add(
            "Flow-GRPO compares the samples of a group, but --n-samples-per-prompt is 1: every advantage would be 0 "
            "(--globalize-reward-mean compares over the batch)"
        )
    problems.positive(diffusion_adv_clip_max=algorithm.diffusion_adv_clip_max)
    problems.not_negative(
        diffusion_clip_range=algorithm.diffusion_clip_range, diffusion_kl_beta=algorithm.diffusion_kl_beta
    )
    if algorithm.loss_type == "nft" and not (algorithm.use_ema and algorithm.rollout_weights == "ema"):
        problems.add(
            "--loss-type nft trains against the moving average that sampled: it needs --use-ema --rollout-weights ema"
        )
    elif algorithm.rollout_weights == "ema" and not algorithm.use_ema:
        problems.add("--rollout-weights ema needs --use-ema")
    elif algorithm.use_ema and algorithm.rollout_weights == "actor":
        problems.add("--use-ema keeps an average that nothing reads: add --rollout-weights ema")
    problems.positive(diffusion_nft_beta=algorithm.diffusion_nft_beta)
    for name in ("ema_decay_init", "ema_decay_max"):
        problems.require(0 <= getattr(algorithm, name) <= 1, f"--{name.replace('_', '-')} must be in [0, 1]")
    problems.not_negative(
        ema_decay_ramp=algorithm.ema_decay_ramp,
        ema_decay_flat_steps=algorithm.ema_decay_flat_steps,
        diffusion_nft_num_dropped_timesteps=algorithm.diffusion_nft_num_dropped_timesteps,
    )
    problems.require(
        algorithm.diffusion_nft_num_dropped_timesteps < config.sampling.diffusion_num_steps,
        f"--diffusion-nft-num-dropped-timesteps {algorithm.diffusion_nft_num_dropped_timesteps} leaves none of the "
        f"{config.sampling.diffusion_num_steps} --diffusion-num-steps",
    )
    if algorithm.diffusion_kl_beta > 0 and algorithm.ref_mode == "none":
        problems.add(f"--diffusion-kl-beta {algorithm.diffusion_kl_beta} has no effect with --ref-mode none")
    if config.model.ref_load is not None and algorithm.ref_mode == "none":
        problems.add("--ref-load is read only with --ref-mode ref")
