"""What can be told of a configuration without reading a file: derived values, and every problem at once."""

from __future__ import annotations

import dataclasses

from llm_rl.config.correction import check_correction
from llm_rl.config.replay import check_replay
from llm_rl.config.score_centering import check_score_centering
from llm_rl.config.train import TrainConfig
from rewards import known_rm_types
from shared_runtime.config import Problems, resolve_batch
from shared_runtime.config.problems import nearest


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
    config.lora.check(problems)
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
    check_score_centering(config, problems)
    check_replay(config, problems)
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
        algorithm.loss_type in ("policy_loss", "score_centering")
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
    problems.positive(
        loss_length_divisor=algorithm.loss_length_divisor, ref_update_interval=algorithm.ref_update_interval
    )
    if algorithm.loss_length_divisor is not None and algorithm.calculate_per_token_loss:
        problems.add("--loss-length-divisor stands in for a sample's length, which --calculate-per-token-loss ignores")
    if algorithm.loss_length_divisor is not None and algorithm.loss_type == "dpo_loss":
        problems.add("--loss-length-divisor divides sums over tokens, which --loss-type dpo_loss leaves as they are")
    if algorithm.ref_update_interval is not None:
        _check_ref_update(config, problems)
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
    if algorithm.loss_type not in ("policy_loss", "score_centering") and (
        algorithm.advantage_estimator == "ppo" or config.distillation.use_opd
    ):
        problems.add(
            f"--loss-type {algorithm.loss_type} reads no advantages: --advantage-estimator ppo and --use-opd need "
            "--loss-type policy_loss"
        )
    custom = config.hooks.custom_loss_function_path
    if (algorithm.loss_type == "custom_loss") != (custom is not None):
        problems.add("--loss-type custom_loss and --custom-loss-function-path go together")


def _check_ref_update(config: TrainConfig, problems: Problems) -> None:
    algorithm = config.algorithm
    if algorithm.loss_type == "dpo_loss" or not (algorithm.use_kl_loss or algorithm.kl_coef > 0):
        problems.add("--ref-update-interval renews the reference of --use-kl-loss or --kl-coef")
    if config.lora.use_lora:
        problems.add("--ref-update-interval can't be used with LoRA, whose reference is the model without adapters")
