"""The workers of a run: trainer ranks and rollout engines, in Ray actors or in this process."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from llm_rl.config import TrainConfig
from llm_rl.scoring import reward_options, reward_pool
from llm_rl.trainers.fsdp.settings import FsdpTrainerSettings
from shared_runtime.config import flat_args
from shared_runtime.workers import WorkerClasses, Workers, in_process_workers, ray_workers


def trainer_settings(config: TrainConfig, hooks: dict[str, Any], total_steps: int) -> FsdpTrainerSettings:
    """What the trainer is told: the flags of the same names, and the hooks it calls.

    Args:
        config: The resolved run.
        hooks: Loaded hooks by flag.
        total_steps: Optimizer steps of the whole run, where a decay ends unless told otherwise.
    """
    flat = vars(flat_args(config))
    names = {f.name for f in dataclasses.fields(FsdpTrainerSettings)}
    settings = FsdpTrainerSettings(**{name: value for name, value in flat.items() if name in names})
    return dataclasses.replace(
        settings,
        lr_decay_iters=config.optimizer.lr_decay_iters or total_steps,
        publish_dtype=config.model.rollout_dtype,
        custom_loss=hooks.get("--custom-loss-function-path"),
        custom_tis_function=hooks.get("--custom-tis-function-path"),
        pg_loss_reducer=hooks.get("--custom-pg-loss-reducer-function-path"),
        hook_args=flat_args(config),
    )


def engine_kwargs(config: TrainConfig) -> dict[str, Any]:
    """Constructor arguments of a local engine."""
    return {
        "model_dir": config.model.hf_checkpoint,
        "dtype": config.model.rollout_dtype or config.fsdp.train_dtype,
        "max_batch_size": config.model.rollout_max_batch_size,
    }


def open_workers(
    config: TrainConfig, settings: FsdpTrainerSettings, logs: Path
) -> contextlib.AbstractContextManager[Workers]:
    """The run's workers, where its configuration wants them; they end with the block."""
    from llm_rl.engines.local import LocalEngine
    from llm_rl.trainers.fsdp.trainer import FsdpTrainer

    pool = partial(reward_pool, config.reward.rm_type or "", config.reward_pool, reward_options(config.reward.rm_url))
    classes = WorkerClasses(FsdpTrainer, settings, LocalEngine, engine_kwargs(config), pool)
    if config.run.in_process:
        return in_process_workers(classes, config.debug)
    return ray_workers(classes, config.cluster, config.debug, config.reward_pool, logs)
