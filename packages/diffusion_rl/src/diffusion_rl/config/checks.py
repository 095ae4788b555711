"""Derived settings, and what can be refused without reading a file."""

from __future__ import annotations

import dataclasses
from typing import Any

from diffusion_rl.config.train import TrainConfig, numbers
from rewards import known_rm_types
from shared_runtime.config import Problems, resolve_batch
from shared_runtime.config.problems import nearest


def resolve(config: TrainConfig) -> TrainConfig:
    """Fill in derived values and check everything that can be told without reading a file.

    Raises:
        ConfigError: With every problem found.
    """
    problems = Problems()
    algorithm = config.algorithm
    ref_mode = algorithm.ref_mode
    if ref_mode is None:
        ref_mode = "none" if algorithm.diffusion_kl_beta <= 0 else "lora_base" if config.lora.use_lora else "ref"
    config = dataclasses.replace(
        config,
        batch=resolve_batch(config.batch, problems),
        algorithm=dataclasses.replace(algorithm, ref_mode=ref_mode),
    )
    config.cluster.check(problems)
    config.optimizer.check(problems)
    config.checkpoint.check(problems)
    config.tracking.check(problems)
    config.media.check(problems)
    config.debug.check(problems)
    built_in = config.reward.rm_type if config.hooks.custom_rm_path is None else None
    config.reward_options.check(problems, built_in)
    config.reward_pool.check(problems, config.cluster, in_process=config.run.in_process, rm_type=built_in)
    _check_sources(config, problems)
    _check_batch(config, problems)
    _check_sampling(config, problems)
    _check_evaluation(config, problems)
    _check_algorithm(config, problems)
    _check_lora(config, problems)
    problems.raise_if_any()
    return config


def _check_sources(config: TrainConfig, problems: Problems) -> None:
    model, data, debug = config.model, config.data, config.debug
    if model.hf_checkpoint is None:
        problems.add("--hf-checkpoint is missing: the diffusers directory of the pipeline to train")
    if data.prompt_data is None and data.data_source_path is None:
        problems.add("--prompt-data is missing: a JSONL or parquet file of prompts (or --data-source-path)")
    problems.positive(update_weight_buffer_size=model.update_weight_buffer_size)
    if model.train_pipeline_config_path is not None and model.diffusion_model_family is not None:
        problems.add("--train-pipeline-config-path and --diffusion-model-family exclude each other")
    if config.run.in_process and config.world_size > 1:
        problems.add(f"--in-process is one trainer rank, but the layout asks for {config.world_size}")
    if debug.save_debug_rollout_data or debug.load_debug_rollout_data:
        problems.add("--save-debug-rollout-data and --load-debug-rollout-data can't hold images and latents yet")
    reward, supervised = config.reward.rm_type, config.algorithm.loss_type == "sft_loss"
    if supervised and data.label_key is None:
        problems.add("--loss-type sft_loss needs --label-key: where a row has the path of its picture")
    if supervised and data.data_source_path is not None:
        problems.add("--loss-type sft_loss reads --prompt-data; --data-source-path can't bring pictures")
    if supervised and config.evaluation.sets() == {}:
        pass  # nothing is scored
    elif reward is None and config.hooks.custom_rm_path is None:
        problems.add("no reward: give --rm-type or --custom-rm-path")
    for name in ("group_rm", "custom_rm_args"):
        if getattr(config.reward, name) and config.hooks.custom_rm_path is None:
            problems.add(f"--{name.replace('_', '-')} needs --custom-rm-path")
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
    if config.algorithm.loss_type == "sft_loss":
        trained = 1
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
    on_images = config.algorithm.loss_type in ("nft", "sft_loss")
    if on_images:
        pass  # however they were drawn
    elif sampling.diffusion_sde_type == "ode" and config.hooks.sde_step_backend_path is None:
        problems.add("--diffusion-sde-type ode has no log-probs, which Flow-GRPO needs: use sde or cps")
    problems.require(
        sampling.diffusion_noise_level > 0 or on_images,
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
    algorithm, group, hooks = config.algorithm, config.batch.n_samples_per_prompt or 1, config.hooks
    if (algorithm.loss_type == "custom_loss") != (hooks.custom_loss_function_path is not None):
        problems.add("--loss-type custom_loss and --custom-loss-function-path go together")
    if hooks.custom_convert_samples_to_train_data_path is not None:
        for name in ("custom_reward_post_process_path", "custom_expand_samples_to_train_pairs_path"):
            if getattr(hooks, name) is not None:
                problems.add(
                    f"--{name.replace('_', '-')} would never be called: --custom-convert-samples-to-train-data-path "
                    "makes advantages and rows itself"
                )
    own_advantages = hooks.custom_reward_post_process_path or hooks.custom_convert_samples_to_train_data_path
    supervised = algorithm.loss_type == "sft_loss"
    if supervised and group != 1:
        problems.add(f"--loss-type sft_loss takes each picture once: --n-samples-per-prompt must be 1, not {group}")
    if supervised and (algorithm.diffusion_kl_beta > 0 or algorithm.diffusion_grpo_guard):
        problems.add("--diffusion-kl-beta and --diffusion-grpo-guard do nothing with --loss-type sft_loss")
    problems.positive(fsdp_flow_shift=algorithm.fsdp_flow_shift)
    if group < 2 and not supervised and not algorithm.globalize_reward_mean and own_advantages is None:
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
    if config.model.ref_load is not None and algorithm.ref_mode != "ref":
        problems.add("--ref-load is read only with --ref-mode ref")
    if config.model.ref_lora_adapter_path is not None and algorithm.ref_mode != "ref":
        problems.add("--ref-lora-adapter-path is read only with --ref-mode ref")


def _check_lora(config: TrainConfig, problems: Problems) -> None:
    lora = config.lora
    problems.positive(lora_rank=lora.lora_rank, lora_alpha=lora.lora_alpha)
    if not lora.use_lora and lora.lora_target_modules:
        problems.add("--lora-target-modules has no effect without --use-lora")
    if not lora.use_lora and lora.lora_adapter_path is not None:
        problems.add("--lora-adapter-path holds adapters to train on, which needs --use-lora")
    if not lora.use_lora and config.algorithm.ref_mode == "lora_base":
        problems.add("--ref-mode lora_base is the model without its adapters: it needs --use-lora")
