"""The workers of a run: trainer ranks and rollout engines, in Ray actors or in this process."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from diffusion_rl.config import TrainConfig, hook_args
from diffusion_rl.models.family import ModelFamily
from diffusion_rl.scoring import reward_pool
from diffusion_rl.trainers.fsdp.settings import FsdpTrainerSettings
from shared_runtime.config import flat_args
from shared_runtime.workers import WorkerClasses, Workers, in_process_workers, ray_workers


def trainer_settings(
    config: TrainConfig, family: ModelFamily, hooks: dict[str, Any], total_steps: int
) -> FsdpTrainerSettings:
    """What the trainer is told: the flags of the same names, and the hooks it calls.

    Args:
        config: The resolved run.
        family: Of the checkpoint.
        hooks: Loaded hooks by flag.
        total_steps: Optimizer steps of the whole run, where a decay ends unless told otherwise.
    """
    flat = vars(flat_args(config))
    names = {f.name for f in dataclasses.fields(FsdpTrainerSettings)}
    settings = FsdpTrainerSettings(**{name: value for name, value in flat.items() if name in names})
    return dataclasses.replace(
        settings,
        diffusion_model_family=family,
        lr_decay_iters=config.optimizer.lr_decay_iters or total_steps,
        sde_step_backend=hooks.get("--sde-step-backend-path"),
        model_backend=hooks.get("--model-backend-path"),
        prepare_train_batch=hooks.get("--custom-prepare-train-batch-path"),
        custom_loss=hooks.get("--custom-loss-function-path"),
        hook_args=hook_args(config),
    )


def engine_kwargs(config: TrainConfig, family: ModelFamily, backend: Any = None) -> dict[str, Any]:
    """Constructor arguments of a local engine."""
    return {
        "model_dir": config.model.hf_checkpoint,
        "family": family,
        "backend": backend,
        "dtype": config.fsdp.diffusion_forward_dtype,
        "param_dtype_patterns": config.fsdp.param_dtype_patterns,
        "train_components": (config.model.update_weight_target_module,),
    }


def open_workers(
    config: TrainConfig, family: ModelFamily, settings: FsdpTrainerSettings, logs: Path
) -> contextlib.AbstractContextManager[Workers]:
    """The run's workers, where its configuration wants them; they end with the block."""
    from diffusion_rl.engines.local import LocalEngine
    from diffusion_rl.trainers.fsdp.trainer import FsdpTrainer

    pool = partial(reward_pool, config.reward.rm_type or "", config.reward_pool, config.reward_options.options())
    classes = WorkerClasses(
        FsdpTrainer, settings, LocalEngine, engine_kwargs(config, family, settings.model_backend), pool
    )
    if config.run.in_process:
        return in_process_workers(classes, config.debug)
    return ray_workers(classes, config.cluster, config.debug, config.reward_pool, logs)
