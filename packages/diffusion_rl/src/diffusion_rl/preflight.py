"""Everything that can be checked before a worker starts: pipeline, sizes, steps, prompts, rewards, hooks, layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from diffusion_rl.algorithms.nft_timesteps import NFT_STRATEGIES
from diffusion_rl.algorithms.step_strategies import STEP_STRATEGIES, check_strategy
from diffusion_rl.config import HooksConfig, TrainConfig, hook_args
from diffusion_rl.generation import GENERATE_HOOK
from diffusion_rl.models.family import ModelFamily
from diffusion_rl.models.forward import dtype_patterns
from diffusion_rl.models.loading import ModelBackend, check_size, component_parameters, model_backend
from diffusion_rl.models.registry import check_checkpoint, check_task, own_family, resolve_family
from diffusion_rl.sample import Sample
from diffusion_rl.scoring import row_check
from diffusion_rl.supervised import picture_problem
from shared_runtime.config import ConfigError, Problems, with_num_rollout
from shared_runtime.config.problems import flag
from shared_runtime.data.prompts import PromptDataset, PromptRow
from shared_runtime.hooks import SHARED_HOOKS, ClassSpec, HookSpec, load_hooks
from shared_runtime.placement.layout import ROLLOUT
from shared_runtime.precision.overrides import overridden_modules, param_dtypes
from shared_runtime.precision.policy import torch_dtype
from shared_runtime.rollout.recording import check_recording
from shared_runtime.rollout.scoring import GROUP_REWARD_HOOK
from shared_runtime.training.lora import matched_layers
from shared_runtime.training.lora_files import check_adapter_config, read_adapter_config
from shared_runtime.training.memory import BYTES, PROCESS_BYTES, memory_problem, trained_bytes
from shared_runtime.workers import layout_of

STRATEGY_HOOK = HookSpec(("args", "sample", "num_steps", "seed"))
_STRATEGY = "--diffusion-step-strategy-path"
_NFT_STRATEGY = "--diffusion-nft-timestep-strategy-path"
MAX_PROMPT_PROBLEMS = 5

DIFFUSION_HOOKS: dict[str, HookSpec | ClassSpec] = SHARED_HOOKS | {
    "--custom-generate-function-path": GENERATE_HOOK,
    "--custom-rm-path": GROUP_REWARD_HOOK,
    "--custom-reward-post-process-path": HookSpec(("args", "samples")),
    "--custom-expand-samples-to-train-pairs-path": HookSpec(("args", "samples", "rewards", "raw_rewards")),
    "--custom-convert-samples-to-train-data-path": HookSpec(("args", "samples")),
    "--custom-loss-function-path": HookSpec(("args", "batch", "velocity", "reduce")),
    "--custom-prepare-train-batch-path": HookSpec(("args", "rows", "family", "device")),
    "--model-backend-path": ClassSpec(methods=("load_pipeline", "load_component", "meta_component"), parameters=()),
    "--sde-step-backend-path": ClassSpec(methods=("transition", "log_prob", "stochastic"), parameters=()),
    _STRATEGY: STRATEGY_HOOK,
    _NFT_STRATEGY: HookSpec(("args", "num_steps", "generator")),
}


@dataclass
class Prepared:
    """What the checks read, ready for the run."""

    config: TrainConfig
    family: ModelFamily
    dataset: PromptDataset | None
    eval_sets: dict[str, PromptDataset]
    hooks: dict[str, Any]
    strategy: Callable[..., Any] | None
    nft_strategy: Callable[..., Any]


def preflight(config: TrainConfig) -> Prepared:
    """Check a resolved configuration against the world.

    Raises:
        ConfigError: With everything that is wrong.
    """
    problems = Problems()
    hooks = problems.collect(lambda: _load_hooks(config)) or {}
    family = problems.collect(lambda: _check_model(config))
    if family is not None:
        sampling = config.sampling
        size = (sampling.diffusion_height, sampling.diffusion_width)
        problems.collect(lambda: check_task(family, config.model.diffusion_task))
        problems.collect(lambda: check_size(str(config.model.hf_checkpoint), family, *size))
        problems.collect(lambda: _check_names(config, family, hooks.get("--model-backend-path")))
    problems.collect(lambda: _check_load(config))
    problems.collect(lambda: layout_of(config.cluster, config.debug, config.reward_pool))
    nft, supervised = config.algorithm.loss_type == "nft", config.algorithm.loss_type == "sft_loss"
    if nft and config.sampling.diffusion_step_strategy_path is None:
        config = dataclasses.replace(
            config, sampling=dataclasses.replace(config.sampling, diffusion_step_strategy_path="ode_and_return_last")
        )
    strategy = STEP_STRATEGIES.get(config.sampling.diffusion_step_strategy_path or "") or hooks.get(_STRATEGY)
    if strategy is not None and not nft and not supervised:
        problems.collect(lambda: _check_steps(config, strategy))
    path = config.data.prompt_data
    load = _load_captioned if supervised else _load_prompts
    dataset = problems.collect(partial(load, config, path, "--prompt-data")) if path else None
    loaded = {
        name: problems.collect(partial(_load_prompts, config, path, "--eval-prompt-data"))
        for name, path in config.evaluation.sets().items()
    }
    problems.raise_if_any()
    assert family is not None
    _check_memory(config, problems)
    config = dataclasses.replace(config, batch=with_num_rollout(config.batch, dataset))
    steps = (config.batch.num_rollout or 1) * (config.batch.num_steps_per_rollout or 1)
    config.optimizer.check_decay(problems, total_steps=steps)
    problems.raise_if_any()
    recordings = config.debug.load_debug_rollout_data
    if recordings is not None:
        problems.collect(partial(check_recording, recordings, (config.batch.num_rollout or 1) - 1))
        problems.raise_if_any()
    sets = {name: prompts for name, prompts in loaded.items() if prompts is not None}
    nft_path = config.algorithm.diffusion_nft_timestep_strategy_path
    nft_strategy = NFT_STRATEGIES.get(nft_path or "drop_random_steps") or hooks[_NFT_STRATEGY]
    return Prepared(config, family, dataset, sets, hooks, strategy, nft_strategy)


def _load_hooks(config: TrainConfig) -> dict[str, Any]:
    paths = {flag(f.name): getattr(config.hooks, f.name) for f in dataclasses.fields(HooksConfig)}
    paths["--data-source-path"] = config.data.data_source_path
    strategy = config.sampling.diffusion_step_strategy_path
    paths[_STRATEGY] = None if strategy in STEP_STRATEGIES else strategy
    nft_strategy = config.algorithm.diffusion_nft_timestep_strategy_path
    paths[_NFT_STRATEGY] = None if nft_strategy in NFT_STRATEGIES else nft_strategy
    return load_hooks(paths, DIFFUSION_HOOKS)


def _check_model(config: TrainConfig) -> ModelFamily:
    model = config.model
    for name, path in (("--hf-checkpoint", model.hf_checkpoint), ("--ref-load", model.ref_load)):
        if path is not None and not path.is_dir():
            raise ConfigError([f"{name} {path} is no directory: give a local diffusers pipeline"])
    own = model.train_pipeline_config_path
    family = resolve_family(str(model.hf_checkpoint), own_family(own) if own else model.diffusion_model_family)
    check_checkpoint(str(model.hf_checkpoint), family)
    if model.ref_load is not None:
        check_checkpoint(str(model.ref_load), family)
    if model.update_weight_target_module not in family.train_components:
        raise ConfigError(
            [
                f"--update-weight-target-module {model.update_weight_target_module}: the {family.name} family trains "
                f"{', '.join(family.train_components)}"
            ]
        )
    return family


def _check_names(config: TrainConfig, family: ModelFamily, backend: type[ModelBackend] | None) -> None:
    """Layers and parameters that are named must be there."""
    load = model_backend(backend).meta_component
    model = load(str(config.model.hf_checkpoint), family, config.model.update_weight_target_module)
    patterns = dtype_patterns(family, config.fsdp.param_dtype_patterns)
    compute = torch_dtype(config.fsdp.diffusion_forward_dtype)
    overridden_modules(model, param_dtypes([name for name, _ in model.named_parameters()], patterns, compute))
    if config.lora.use_lora:
        matched_layers(model, config.lora.lora_target_modules or family.lora_target_modules)
    _check_adapters(config)


def _check_adapters(config: TrainConfig) -> None:
    """Adapters to start from must be of the run's size."""
    component, lora = config.model.update_weight_target_module, config.lora
    if lora.lora_adapter_path is not None:
        flag = "--lora-adapter-path"
        stored = read_adapter_config(lora.lora_adapter_path, flag, component=component)
        check_adapter_config(stored, lora.lora_rank, lora.lora_alpha, f"{flag} {lora.lora_adapter_path}")
    if config.model.ref_lora_adapter_path is not None:
        read_adapter_config(config.model.ref_lora_adapter_path, "--ref-lora-adapter-path", component=component)


def _check_load(config: TrainConfig) -> None:
    load: Path | None = config.checkpoint.load
    if load is not None and not (load / "latest_checkpointed_iteration.txt").is_file():
        raise ConfigError([f"--load {load} holds no checkpoint (no latest_checkpointed_iteration.txt)"])


def _check_memory(config: TrainConfig, problems: Problems) -> None:
    """Refuse a pipeline that can't fit into this machine's memory; on GPUs and clusters only the run can tell."""
    import torch

    model, fsdp = config.model, config.fsdp
    counts = component_parameters(str(model.hf_checkpoint))
    whole, trained = sum(counts.values()), counts.get(model.update_weight_target_module)
    if trained is None or torch.cuda.is_available() or config.cluster.ray_address is not None:
        return
    roles = layout_of(config.cluster, config.debug, config.reward_pool).roles
    engines = len(roles[ROLLOUT].workers) if ROLLOUT in roles else 0
    # Encoders and VAE are kept in float32, the component that trains in the dtype of the forward pass.
    needed = engines * (4 * (whole - trained) + BYTES[fsdp.diffusion_forward_dtype] * trained + PROCESS_BYTES)
    if config.debug.trains:
        needed += config.world_size * PROCESS_BYTES + trained_bytes(
            trained,
            master_dtype=fsdp.fsdp_master_dtype,
            compute_dtype=fsdp.diffusion_forward_dtype,
            adam=config.optimizer.optimizer == "adam",
            frozen=config.lora.use_lora,
        )
        copies = (config.algorithm.use_ema and not config.lora.use_lora) + (config.algorithm.ref_mode == "ref")
        needed += copies * BYTES[fsdp.fsdp_master_dtype] * trained
    hint = "Take a smaller model, --use-lora, or --diffusion-forward-dtype bf16 for the engine's half"
    if problem := memory_problem(model.hf_checkpoint or Path(), whole, needed, hint):
        problems.add(problem)


def _check_steps(config: TrainConfig, strategy: Callable[..., Any]) -> None:
    """Ask the strategy once: steps and windows that don't fit the schedule show here."""
    num_steps, path = config.sampling.diffusion_num_steps, str(config.sampling.diffusion_step_strategy_path)
    sde, _ = check_strategy(strategy(hook_args(config), Sample(), num_steps, 0), num_steps, path)
    if sde is not None and not sde:
        raise ConfigError([f"{_STRATEGY} {path} picked no stochastic step, so there would be nothing to train on"])


def _load_captioned(config: TrainConfig, path: str, named_by: str) -> PromptDataset:
    prompts = _read_prompts(config, path, named_by, config.data.label_key)
    height, width = config.sampling.diffusion_height, config.sampling.diffusion_width
    return _checked(prompts, path, lambda row: picture_problem(row, prompts.path.parent, height, width))


def _load_prompts(config: TrainConfig, path: str, named_by: str) -> PromptDataset:
    check = row_check(config.reward.rm_type) if config.hooks.custom_rm_path is None else lambda row: None
    supervised = config.algorithm.loss_type == "sft_loss"  # a label is a picture there, and prompts to score have none
    label_key = None if supervised else config.data.label_key
    return _checked(_read_prompts(config, path, named_by, label_key), path, check)


def _read_prompts(config: TrainConfig, path: str, named_by: str, label_key: str | None) -> PromptDataset:
    data = config.data
    return PromptDataset.load(
        path, input_key=data.input_key, label_key=label_key, metadata_key=data.metadata_key, flag=named_by
    )


def _checked(prompts: PromptDataset, path: str, check: Callable[[PromptRow], str | None]) -> PromptDataset:
    found = []
    for position, row in enumerate(prompts):
        text = isinstance(row.prompt, str)
        problem = check(row) if text else "the prompt is a list of chat messages, and images are drawn from text"
        if problem is not None:
            found.append(f"{prompts.where(position)}: {problem}")
    if len(found) > MAX_PROMPT_PROBLEMS:
        found = [*found[:MAX_PROMPT_PROBLEMS], f"{path}: {len(found) - MAX_PROMPT_PROBLEMS} more rows like these"]
    if found:
        raise ConfigError(found)
    return prompts
