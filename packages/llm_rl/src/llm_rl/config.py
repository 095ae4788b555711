"""Everything a language-model run can be told, as typed groups. What stands here is the help text. Imports no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from llm_rl.correction_config import CorrectionConfig, check_correction
from llm_rl.role_config import CriticConfig, DistillationConfig
from rewards import known_rm_types
from shared_runtime.config import (
    BatchConfig,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    DebugConfig,
    FsdpConfig,
    OptimizerConfig,
    Problems,
    RewardPoolConfig,
    RunConfig,
    TrackingConfig,
    resolve_batch,
)
from shared_runtime.config.problems import nearest

AdvantageEstimator = Literal[
    "grpo", "gspo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "cispo"
]


@dataclass(frozen=True)
class ModelConfig:
    """The model and who trains and serves it."""

    hf_checkpoint: Path | None = None
    """Hugging Face directory: tokenizer, config and weights."""
    ref_load: Path | None = None
    """Hugging Face directory of the frozen reference. Unset: --hf-checkpoint."""
    train_backend: Literal["fsdp"] = "fsdp"
    """Trainer backend."""
    rollout_engine: Literal["local"] = "local"
    """Rollout engine; local runs the Hugging Face model in a worker process."""
    rollout_dtype: Literal["bf16", "fp32"] | None = None
    """Dtype of the engine's weights. Unset: --train-dtype."""
    rollout_max_batch_size: int = 512
    """Sequences that the local engine generates at once."""
    update_weights_interval: int = 1
    """Rollouts between weight updates; above 1 rollouts lag behind the trained weights, evaluations in between too."""
    update_weight_buffer_size: int = 512 * 1024 * 1024
    """Largest bucket of a weight update, in bytes."""
    check_weight_update_equal: bool = False
    """Compare a checksum of every tensor after every update."""


@dataclass(frozen=True)
class SamplingConfig:
    """How responses are drawn."""

    apply_chat_template: bool = False
    """Wrap prompts in the tokenizer's chat template."""
    rollout_max_response_len: int = 512
    """Most tokens of a response."""
    rollout_max_prompt_len: int | None = None
    """Longest prompt allowed. Unset: what the model's context leaves."""
    rollout_temperature: float = 1.0
    """Sampling temperature; training takes its log-probs at the same one."""
    rollout_top_p: float = 1.0
    """Nucleus mass; 1 disables."""
    rollout_top_k: int = -1
    """Keep the k likeliest tokens; -1 disables."""
    rollout_stop: tuple[str, ...] = ()
    """Strings that end a response."""
    rollout_stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a response, besides the model's own."""
    rollout_submission_granularity: Literal["group", "sample"] = "group"
    """What frees room under --rollout-max-in-flight: a finished group or a finished sample."""
    rollout_max_in_flight: int | None = None
    """At most this many samples are generated at once. Unset: all."""


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out prompts."""

    eval_prompt_data: tuple[str, ...] = ()
    """Pairs of name and path: `--eval-prompt-data sums eval.jsonl`."""
    eval_interval: int | None = None
    """Rollouts between evaluations. Unset: before the first and after the last rollout."""
    n_samples_per_eval_prompt: int = 1
    """Responses per prompt."""
    eval_max_response_len: int | None = None
    """Unset: as in the rollout."""
    eval_temperature: float | None = None
    """Unset: as in the rollout."""
    eval_top_p: float | None = None
    """Unset: as in the rollout."""
    eval_top_k: int | None = None
    """Unset: as in the rollout."""
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
    """Built-in reward; `boxed_` before a name takes the last \\boxed{} first."""
    rm_url: str | None = None
    """Address of the service when --rm-type is remote_rm."""
    reward_key: str | None = None
    """Key of the training reward in rewards that are dicts. Unset: score."""
    group_rm: bool = False
    """Call the custom reward once for each group."""
    on_reward_error: Literal["raise", "drop"] = "raise"
    """A reward that fails or is not finite stops the run, or drops its sample and counts it."""


@dataclass(frozen=True)
class AlgorithmConfig:
    """The objective."""

    advantage_estimator: Literal[
        "grpo", "gspo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "cispo"
    ] = "grpo"
    """How rewards become advantages."""
    disable_grpo_std_normalization: bool = False
    """Centre group rewards without dividing by their standard deviation."""
    normalize_advantages: bool = False
    """Whiten advantages over all trainable tokens of all ranks."""
    gamma: float = 1.0
    """Discount of the token-level returns."""
    lambd: float = 1.0
    """λ of generalised advantage estimation (ppo): 1 takes whole returns, 0 one-step differences."""
    loss_type: Literal["policy_loss", "sft_loss", "dpo_loss", "custom_loss"] = "policy_loss"
    """Policy gradient, supervised on given responses, preference pairs (DPO), or --custom-loss-function-path."""
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


@dataclass(frozen=True)
class TrainConfig:
    """A whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reward_pool: RewardPoolConfig = field(default_factory=RewardPoolConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    hooks: HooksConfig = field(default_factory=HooksConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.cluster.actor_num_nodes * self.cluster.actor_num_gpus_per_node

    @property
    def supervised(self) -> bool:
        """Whether responses are given, not drawn."""
        return self.algorithm.loss_type in ("sft_loss", "dpo_loss")


def resolve(config: TrainConfig) -> TrainConfig:
    """Fill in derived values and check everything that can be told without reading a file.

    Raises:
        ConfigError: With every problem found.
    """
    problems = Problems()
    if config.supervised:
        config = _resolve_supervised(config, problems)
    config = dataclasses.replace(config, batch=resolve_batch(config.batch, problems))
    config.cluster.check(problems)
    config.optimizer.check(problems)
    config.fsdp.check(problems, config.world_size)
    config.checkpoint.check(problems)
    config.tracking.check(problems)
    _check_sources(config, problems)
    _check_sampling(config, problems)
    _check_reward(config, problems)
    _check_algorithm(config, problems)
    config.critic.check(
        problems, used=config.algorithm.advantage_estimator == "ppo", num_rollout=config.batch.num_rollout
    )
    config.distillation.check(problems, rm_url=config.reward.rm_url, temperature=config.sampling.rollout_temperature)
    check_correction(
        config.correction,
        problems,
        loss_type=config.algorithm.loss_type,
        use_rollout_logprobs=config.algorithm.use_rollout_logprobs,
        function=config.hooks.custom_tis_function_path,
    )
    config.debug.check(problems, own_rollouts=config.supervised)
    built_in = config.reward.rm_type if config.hooks.custom_rm_path is None else None
    config.reward_pool.check(problems, config.cluster, in_process=config.run.in_process, rm_type=built_in)
    problems.raise_if_any()
    return config


def _resolve_supervised(config: TrainConfig, problems: Problems) -> TrainConfig:
    """The group size that the data has, and no engines where nothing is evaluated."""
    flag = f"--loss-type {config.algorithm.loss_type}"
    size, given = 2 if config.algorithm.loss_type == "dpo_loss" else 1, config.batch.n_samples_per_prompt
    if given not in (None, size):
        problems.add(f"{flag} reads {size} response(s) of each row: --n-samples-per-prompt must be {size}, not {given}")
    unused = {
        "--data-source-path": config.data.data_source_path,
        "--rollout-function-path": config.hooks.rollout_function_path,
        "--debug-rollout-only": config.debug.debug_rollout_only,
        "--save-debug-rollout-data": config.debug.save_debug_rollout_data,
        "--load-debug-rollout-data": config.debug.load_debug_rollout_data,
        "--use-kl-loss": config.algorithm.use_kl_loss,
        "--kl-coef": config.algorithm.kl_coef,
    }
    for name, value in unused.items():
        if value:
            problems.add(f"{name} has no part in {flag}, which trains on the responses of --prompt-data")
    return dataclasses.replace(
        config,
        batch=dataclasses.replace(config.batch, n_samples_per_prompt=size),
        debug=dataclasses.replace(config.debug, debug_train_only=not config.evaluation.sets()),
    )


def _check_sources(config: TrainConfig, problems: Problems) -> None:
    model, data = config.model, config.data
    if model.hf_checkpoint is None:
        problems.add("--hf-checkpoint is missing: the Hugging Face directory of the model to train")
    if data.prompt_data is None and data.data_source_path is None:
        problems.add("--prompt-data is missing: a JSONL or parquet file of prompts (or --data-source-path)")
    problems.positive(
        rollout_max_batch_size=model.rollout_max_batch_size,
        update_weight_buffer_size=model.update_weight_buffer_size,
        update_weights_interval=model.update_weights_interval,
    )
    saved, interval = config.checkpoint.save_interval, model.update_weights_interval
    if saved is not None and interval > 0 and saved % interval:
        problems.add(
            f"--save-interval {saved} is no multiple of --update-weights-interval {interval}: a run that goes on from "
            "a checkpoint between two updates would not lag as it did"
        )
    if config.run.in_process and config.world_size > 1:
        problems.add(f"--in-process is one trainer rank, but the layout asks for {config.world_size}")


def _check_sampling(config: TrainConfig, problems: Problems) -> None:
    sampling, evaluation = config.sampling, config.evaluation
    problems.positive(
        rollout_max_response_len=sampling.rollout_max_response_len,
        rollout_max_prompt_len=sampling.rollout_max_prompt_len,
        rollout_max_in_flight=sampling.rollout_max_in_flight,
        eval_interval=evaluation.eval_interval,
        eval_max_response_len=evaluation.eval_max_response_len,
        n_samples_per_eval_prompt=evaluation.n_samples_per_eval_prompt,
    )
    problems.require(
        sampling.rollout_temperature > 0,
        f"--rollout-temperature must be above 0, got {sampling.rollout_temperature}: greedy rollouts teach nothing",
    )
    problems.not_negative(eval_temperature=evaluation.eval_temperature)
    for name, top_p in (("--rollout-top-p", sampling.rollout_top_p), ("--eval-top-p", evaluation.eval_top_p)):
        problems.require(top_p is None or 0 < top_p <= 1, f"{name} must be in (0, 1], got {top_p}")
    for name, top_k in (("--rollout-top-k", sampling.rollout_top_k), ("--eval-top-k", evaluation.eval_top_k)):
        problems.require(
            top_k is None or top_k == -1 or top_k > 0, f"{name} must be above 0, or -1 for all tokens, got {top_k}"
        )
    problems.require(all(sampling.rollout_stop), "--rollout-stop holds an empty string, which every text ends with")
    words = evaluation.eval_prompt_data
    if len(words) % 2:
        problems.add(f"--eval-prompt-data takes pairs of name and path, got {len(words)} words: {' '.join(words)}")
    elif len(evaluation.sets()) < len(words) // 2:
        problems.add("--eval-prompt-data: two sets have the same name")
    if (evaluation.eval_interval or evaluation.eval_target is not None) and not words:
        problems.add("--eval-interval and --eval-target need --eval-prompt-data")
    if config.hooks.eval_function_path is not None and not words:
        problems.add("--eval-function-path stands in for the sets of --eval-prompt-data: name at least one")


def _check_reward(config: TrainConfig, problems: Problems) -> None:
    reward, hooks = config.reward, config.hooks
    scores = not config.supervised or bool(config.evaluation.sets())
    if scores and reward.rm_type is None and hooks.custom_rm_path is None:
        problems.add("no reward: give --rm-type or --custom-rm-path")
    if reward.rm_type is not None:
        name = reward.rm_type.removeprefix("boxed_")
        if name not in known_rm_types():
            problems.add(f"--rm-type {reward.rm_type} is unknown{nearest(name, known_rm_types())}")
        if name == "remote_rm" and not reward.rm_url:
            problems.add("--rm-type remote_rm needs --rm-url")
    if reward.group_rm and hooks.custom_rm_path is None:
        problems.add("--group-rm calls a custom reward: it needs --custom-rm-path")


def _check_algorithm(config: TrainConfig, problems: Problems) -> None:
    algorithm, batch = config.algorithm, config.batch
    grouped = {"grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus_baseline"}
    if (
        algorithm.loss_type == "policy_loss"
        and algorithm.advantage_estimator in grouped
        and not config.distillation.use_opd
        and (batch.n_samples_per_prompt or 1) < 2
    ):
        problems.add(
            f"--advantage-estimator {algorithm.advantage_estimator} compares the samples of a group, but "
            "--n-samples-per-prompt is 1: every advantage would be 0"
        )
    problems.require(0 < algorithm.eps_clip < 1, f"--eps-clip must be in (0, 1), got {algorithm.eps_clip}")
    problems.positive(eps_clip_high=algorithm.eps_clip_high)
    problems.require(
        algorithm.eps_clip_c is None or algorithm.eps_clip_c > 1,
        f"--eps-clip-c must be above 1, got {algorithm.eps_clip_c}",
    )
    problems.not_negative(
        kl_loss_coef=algorithm.kl_loss_coef, entropy_coef=algorithm.entropy_coef, kl_coef=algorithm.kl_coef
    )
    problems.require(0 < algorithm.gamma <= 1, f"--gamma must be in (0, 1], got {algorithm.gamma}")
    problems.require(0 <= algorithm.lambd <= 1, f"--lambd must be in [0, 1], got {algorithm.lambd}")
    problems.not_negative(opsm_delta=algorithm.opsm_delta)
    if algorithm.use_unbiased_kl and not algorithm.use_kl_loss:
        problems.add("--use-unbiased-kl has no effect without --use-kl-loss")
    if algorithm.kl_loss_coef > 0 and not algorithm.use_kl_loss:
        problems.add(f"--kl-loss-coef {algorithm.kl_loss_coef} has no effect without --use-kl-loss")
    if algorithm.kl_coef > 0 and algorithm.advantage_estimator == "ppo":
        problems.add(
            "--kl-coef must be 0 with --advantage-estimator ppo: the critic would be trained towards returns without "
            f"the penalty; use --use-kl-loss --kl-loss-coef {algorithm.kl_coef}"
        )
    elif algorithm.kl_coef > 0 and not algorithm.advantage_estimator.startswith("reinforce_plus_plus"):
        problems.add(
            f"--kl-coef penalises the token rewards of the REINFORCE++ estimators, not of "
            f"{algorithm.advantage_estimator}: use --use-kl-loss --kl-loss-coef {algorithm.kl_coef}"
        )
    preference = config.preference
    problems.positive(dpo_beta=preference.dpo_beta)
    problems.require(
        0 <= preference.dpo_label_smoothing < 0.5,
        f"--dpo-label-smoothing must be in [0, 0.5), got {preference.dpo_label_smoothing}",
    )
    with_reference = algorithm.use_kl_loss or algorithm.kl_coef > 0 or algorithm.loss_type == "dpo_loss"
    if config.model.ref_load is not None and not with_reference:
        problems.add("--ref-load is read only with --use-kl-loss, --kl-coef or --loss-type dpo_loss")
    if algorithm.loss_type != "policy_loss" and (algorithm.advantage_estimator == "ppo" or config.distillation.use_opd):
        problems.add(
            f"--loss-type {algorithm.loss_type} reads no advantages: --advantage-estimator ppo and --use-opd need "
            "--loss-type policy_loss"
        )
    custom = config.hooks.custom_loss_function_path
    if (algorithm.loss_type == "custom_loss") != (custom is not None):
        problems.add("--loss-type custom_loss and --custom-loss-function-path go together")
