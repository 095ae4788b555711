"""Everything that can be checked before a worker starts: files, prompts, labels, hooks, memory, layout."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llm_rl.config import HooksConfig, TrainConfig
from llm_rl.conversations import ConversationEncoder
from llm_rl.generation import GENERATE_HOOK
from llm_rl.prompts import PromptEncoder, check_prompts
from llm_rl.scoring import GROUP_REWARD_HOOK, SAMPLE_REWARD_HOOK, row_check
from llm_rl.supervised import check_rows, load_pairs
from llm_rl.teachers import check_same_tokenizer, remote_teachers
from llm_rl.train_data import CONVERT_HOOK, REWARD_POST_PROCESS_HOOK
from shared_runtime.config import ConfigError, Problems, with_num_rollout
from shared_runtime.config.problems import flag
from shared_runtime.data.prompts import PromptDataset
from shared_runtime.hooks import SHARED_HOOKS, ClassSpec, HookSpec, load_hooks, takes_keyword
from shared_runtime.placement.layout import ROLLOUT
from shared_runtime.rollout.recording import check_recording
from shared_runtime.training.lora_files import check_adapter_config, read_adapter_config
from shared_runtime.training.memory import BYTES, PROCESS_BYTES, count_parameters, memory_problem, trained_bytes
from shared_runtime.workers import layout_of

LLM_HOOKS: dict[str, HookSpec | ClassSpec] = SHARED_HOOKS | {
    "--custom-generate-function-path": GENERATE_HOOK,
    "--custom-rm-path": SAMPLE_REWARD_HOOK,
    "--custom-reward-post-process-path": REWARD_POST_PROCESS_HOOK,
    "--custom-convert-samples-to-train-data-path": CONVERT_HOOK,
    "--custom-loss-function-path": HookSpec(("args", "batch", "logits", "reduce")),
    "--custom-tis-function-path": HookSpec(("train_log_probs", "rollout_log_probs", "mask", "segments")),
    "--custom-pg-loss-reducer-function-path": HookSpec(
        ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss")
    ),
}


@dataclass
class Prepared:
    """What the checks read, ready for the run."""

    config: TrainConfig
    tokenizer: Any
    encoder: PromptEncoder
    max_context: int
    dataset: PromptDataset | None
    eval_sets: dict[str, PromptDataset]
    hooks: dict[str, Any]


def preflight(config: TrainConfig) -> Prepared:
    """Check a resolved configuration against the world.

    Raises:
        ConfigError: With everything that is wrong.
    """
    problems = Problems()
    hooks = problems.collect(lambda: _load_hooks(config)) or {}
    problems.collect(partial(_check_correction, config, hooks.get("--custom-tis-function-path")))
    _check_paths(config, problems)
    problems.collect(lambda: layout_of(config.cluster, config.debug, config.reward_pool))
    path = config.data.prompt_data
    load = _load_pairs if config.algorithm.loss_type == "dpo_loss" else _load_prompts
    dataset = problems.collect(partial(load, config, path, "--prompt-data")) if path else None
    loaded = {
        name: problems.collect(partial(_load_prompts, config, path, "--eval-prompt-data"))
        for name, path in config.evaluation.sets().items()
    }
    problems.raise_if_any()
    eval_sets = {name: prompts for name, prompts in loaded.items() if prompts is not None}
    tokenizer, max_context = _load_tokenizer(config)
    encoder = problems.collect(
        lambda: PromptEncoder(tokenizer, apply_chat_template=config.sampling.apply_chat_template)
    )
    problems.raise_if_any()
    assert encoder is not None
    if dataset is not None and config.supervised:
        problems.collect(partial(_check_supervised, config, dataset, encoder, max_context))
    elif dataset is not None:
        longest = problems.collect(partial(_check_prompts, config, dataset, encoder, max_context))
        _check_token_budget(config, longest or 0, problems)
    for prompts in eval_sets.values():
        problems.collect(partial(_check_prompts, config, prompts, encoder, max_context))
    _check_teacher(config, tokenizer, dataset, problems)
    if config.lora.use_lora:
        problems.collect(partial(_check_lora, config))
    _check_memory(config, problems)
    config = dataclasses.replace(config, batch=with_num_rollout(config.batch, dataset))
    _check_decay(config, problems)
    recordings = config.debug.load_debug_rollout_data
    if recordings is not None:
        problems.collect(partial(check_recording, recordings, (config.batch.num_rollout or 1) - 1))
    problems.raise_if_any()
    return Prepared(
        config,
        tokenizer,
        encoder,
        max_context,
        dataset,
        eval_sets,
        hooks,
    )


def _load_hooks(config: TrainConfig) -> dict[str, Any]:
    paths = {flag(f.name): getattr(config.hooks, f.name) for f in dataclasses.fields(HooksConfig)}
    paths["--data-source-path"] = config.data.data_source_path
    specs = dict(LLM_HOOKS)
    if config.reward.group_rm:
        specs["--custom-rm-path"] = GROUP_REWARD_HOOK
    return load_hooks(paths, specs)


def _check_correction(config: TrainConfig, custom: Any) -> None:
    """Refuse flags that the correction function doesn't take, and bounds with which it can't work.

    Raises:
        ConfigError: With the reasons.
        ValueError: From the function itself.
    """
    if config.hooks.custom_tis_function_path is not None and custom is None:
        return  # it could not be loaded, which is noted already
    import torch

    from llm_rl.algorithms.rollout_correction import truncated_importance_sampling
    from llm_rl.algorithms.segments import Segments
    from llm_rl.trainers.fsdp.correction import correction_function

    given, function = config.correction, custom or truncated_importance_sampling
    problems = Problems()
    for f in dataclasses.fields(given):
        if getattr(given, f.name) == f.default or f.name in ("use_tis", "get_mismatch_metrics"):
            continue
        if not given.corrects_rollouts:
            problems.add(f"{flag(f.name)} is read only with --use-tis, --use-rs or --rs-veto-threshold")
        elif not takes_keyword(function, f.name):
            hint = "; --custom-tis-function-path llm_rl.algorithms.mis.mis_correction has it" if custom is None else ""
            problems.add(f"{flag(f.name)} is no parameter of the correction {function.__name__}{hint}")
    problems.raise_if_any()
    if given.corrects_rollouts and function.__module__.startswith("llm_rl."):
        nothing = torch.empty(0)
        correction_function(given, custom)(nothing, nothing, nothing, Segments.of([]))


def _load_prompts(config: TrainConfig, path: str, named_by: str) -> PromptDataset:
    data = config.data
    return PromptDataset.load(
        path, input_key=data.input_key, label_key=data.label_key, metadata_key=data.metadata_key, flag=named_by
    )


def _load_pairs(config: TrainConfig, path: str, named_by: str) -> PromptDataset:
    data, preference = config.data, config.preference
    return load_pairs(
        path,
        input_key=data.input_key,
        chosen_key=preference.chosen_key,
        rejected_key=preference.rejected_key,
        metadata_key=data.metadata_key,
        flag=named_by,
    )


def _check_paths(config: TrainConfig, problems: Problems) -> None:
    directories = {
        "--hf-checkpoint": config.model.hf_checkpoint,
        "--ref-load": config.model.ref_load,
        "--critic-load": config.critic.critic_load,
        "--opd-teacher-load": config.distillation.opd_teacher_load,
    }
    for name, path in directories.items():
        if path is not None and not (path / "config.json").is_file():
            problems.add(f"{name} {path} is not a Hugging Face model directory: it has no config.json")
    load = config.checkpoint.load
    if load is not None and not (load / "latest_checkpointed_iteration.txt").is_file():
        problems.add(f"--load {load} holds no checkpoint (no latest_checkpointed_iteration.txt)")


def _load_tokenizer(config: TrainConfig) -> tuple[Any, int]:
    from transformers import AutoConfig, AutoTokenizer

    directory = config.model.hf_checkpoint
    assert directory is not None  # `resolve` has refused that
    try:
        model_config = AutoConfig.from_pretrained(directory).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except Exception as error:
        raise ConfigError([f"--hf-checkpoint {directory} can't be loaded: {error}"]) from error
    return tokenizer, int(model_config.max_position_embeddings)


def _check_prompts(config: TrainConfig, dataset: PromptDataset, encoder: PromptEncoder, max_context: int) -> int:
    """Tokens of the longest prompt."""
    custom_reward = config.hooks.custom_rm_path is not None
    return check_prompts(
        dataset,
        encoder,
        max_context=max_context,
        max_response_len=config.sampling.rollout_max_response_len,
        max_prompt_len=config.sampling.rollout_max_prompt_len,
        check_row=None if custom_reward else row_check(config.reward.rm_type),
    )


def _check_teacher(config: TrainConfig, tokenizer: Any, dataset: PromptDataset | None, problems: Problems) -> None:
    """A teacher that reads other tokens than the student writes would teach nonsense without a word."""
    directory, remote = config.distillation.opd_teacher_load, remote_teachers(config)
    if directory is not None:
        problems.collect(lambda: check_same_tokenizer(tokenizer, directory))
    if remote is not None:
        for problem in remote.row_problems(dataset) if dataset is not None else []:
            problems.add(problem)
        problems.collect(lambda: remote.check_tokenizer(tokenizer))
        remote.close()


def _check_lora(config: TrainConfig) -> None:
    """Find the adapted layers in an empty model; names that match nothing would be told by a worker otherwise."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(["--lora-rank needs PEFT: install tandem-llm-rl[peft]"])
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from llm_rl.models.lora_targets import lora_targets

    assert config.model.hf_checkpoint is not None
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.model.hf_checkpoint))
    lora_targets(model, config.lora.target_modules, config.lora.exclude_modules)
    lora, flag = config.lora, "--lora-adapter-path"
    if lora.lora_adapter_path is not None:
        stored = read_adapter_config(lora.lora_adapter_path, flag)
        check_adapter_config(stored, lora.lora_rank, lora.lora_alpha, f"{flag} {lora.lora_adapter_path}")


def _check_decay(config: TrainConfig, problems: Problems) -> None:
    optimizer, critic = config.optimizer, config.critic
    steps = (config.batch.num_rollout or 1) * (config.batch.num_steps_per_rollout or 1)
    optimizer.check_decay(problems, total_steps=steps)
    if config.algorithm.advantage_estimator == "ppo":
        optimizer.check_decay(
            problems,
            total_steps=steps,
            warmup_steps=critic.critic_lr_warmup_iters,
            warmup="--critic-lr-warmup-iters",
        )


def _check_supervised(config: TrainConfig, dataset: PromptDataset, encoder: PromptEncoder, max_context: int) -> None:
    check_rows(
        dataset,
        ConversationEncoder(encoder),
        pairs=config.algorithm.loss_type == "dpo_loss",
        max_context=max_context,
        max_tokens_per_gpu=config.batch.max_tokens_per_gpu if config.batch.use_dynamic_batch_size else None,
    )


def _check_token_budget(config: TrainConfig, longest_prompt: int, problems: Problems) -> None:
    """A sample that the budget can't hold would stop the run in the middle."""
    batch, response = config.batch, config.sampling.rollout_max_response_len
    budget = batch.max_tokens_per_gpu if batch.use_dynamic_batch_size else None
    if budget is not None and longest_prompt + response > budget:
        problems.add(
            f"--max-tokens-per-gpu {budget} can't hold the longest prompt of {longest_prompt} tokens with "
            f"--rollout-max-response-len {response}: it must be at least {longest_prompt + response}"
        )


def _check_memory(config: TrainConfig, problems: Problems) -> None:
    """Refuse a model that can't fit into this machine's memory; on GPUs and clusters only the run can tell."""
    import torch

    directory = Path(config.model.hf_checkpoint or ".")
    parameters = count_parameters(directory)
    if parameters is None or torch.cuda.is_available() or config.cluster.ray_address is not None:
        return
    dtype, adam = config.fsdp.train_dtype, config.optimizer.optimizer == "adam"
    roles = layout_of(config.cluster, config.debug, config.reward_pool).roles
    engines = len(roles[ROLLOUT].workers) if ROLLOUT in roles else 0
    needed = engines * (parameters * BYTES[config.model.rollout_dtype or dtype] + PROCESS_BYTES)
    if config.debug.trains:
        algorithm, teacher = config.algorithm, config.distillation.opd_teacher_load
        needed += trained_bytes(parameters, compute_dtype=dtype, adam=adam, frozen=config.lora.use_lora)
        needed += config.world_size * PROCESS_BYTES
        if algorithm.advantage_estimator == "ppo":
            needed += trained_bytes(parameters, compute_dtype=dtype, adam=adam)
        with_reference = algorithm.use_kl_loss or algorithm.kl_coef > 0 or algorithm.loss_type == "dpo_loss"
        if with_reference and (config.model.ref_load is not None or not config.lora.use_lora):
            needed += 4 * parameters
        needed += 4 * (count_parameters(teacher) or 0) if teacher is not None else 0
    hint = "Take a smaller model, --optimizer sgd, or --train-dtype bf16 for the engine's half"
    if problem := memory_problem(directory, parameters, needed, hint):
        problems.add(problem)
