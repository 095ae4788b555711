"""The workers of a run: trainer ranks and rollout engines, in Ray actors or in this process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llm_rl.config import TrainConfig
from llm_rl.trainers.fsdp.settings import FsdpTrainerSettings
from shared_runtime.config import flat_args
from shared_runtime.placement.groups import InProcessGroup, WorkerGroup
from shared_runtime.placement.layout import ACTOR, ROLLOUT, Layout, Pool, lay_out, plan_layout


@dataclasses.dataclass
class Workers:
    """The run's groups; a rollout-only run has no trainers, a train-only run no engines."""

    trainers: WorkerGroup | None
    engines: WorkerGroup | None


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


def layout_of(config: TrainConfig) -> Layout:
    """Which bundles trainers and engines take; halves of a run that are switched off take none.

    Raises:
        LayoutError: If the counts make no layout.
    """
    cluster = config.cluster
    if trains(config) and rolls_out(config):
        return plan_layout(
            colocate=cluster.colocate,
            actor_num_nodes=cluster.actor_num_nodes,
            actor_num_gpus_per_node=cluster.actor_num_gpus_per_node,
            rollout_num_gpus=cluster.rollout_num_gpus,
            rollout_num_gpus_per_engine=cluster.rollout_num_gpus_per_engine,
            num_gpus_per_node=cluster.num_gpus_per_node,
        )
    nodes = (cluster.actor_num_gpus_per_node,) * cluster.actor_num_nodes
    return lay_out([Pool(nodes, {ACTOR: 1} if trains(config) else {ROLLOUT: cluster.rollout_num_gpus_per_engine})])


def trains(config: TrainConfig) -> bool:
    """Whether the run has trainers."""
    return not config.debug.debug_rollout_only


def rolls_out(config: TrainConfig) -> bool:
    """Whether the run has engines."""
    return not (config.debug.debug_train_only or config.debug.load_debug_rollout_data)


@contextlib.contextmanager
def in_process_workers(config: TrainConfig, settings: FsdpTrainerSettings) -> Iterator[Workers]:
    """One trainer rank and one engine in this process, without Ray."""
    from llm_rl.engines.local import LocalEngine
    from llm_rl.trainers.fsdp.trainer import FsdpTrainer

    trainers = InProcessGroup(FsdpTrainer(settings)) if trains(config) else None
    engines = InProcessGroup(LocalEngine(**engine_kwargs(config))) if rolls_out(config) else None
    if trainers is not None:
        trainers.call("init")
    try:
        yield Workers(trainers, engines)
    finally:
        for group in (engines, trainers):
            if group is not None:
                group.shutdown()


@contextlib.contextmanager
def ray_workers(config: TrainConfig, settings: FsdpTrainerSettings, logs: Path) -> Iterator[Workers]:
    """Ray actors on a running cluster, or on a local one that starts and ends with the block."""
    from llm_rl.engines.local import LocalEngine
    from llm_rl.trainers.fsdp.trainer import FsdpTrainer
    from shared_runtime.placement.cluster import ray_cluster
    from shared_runtime.placement.ray_group import RayWorkerGroup

    with ray_cluster(layout_of(config), address=config.cluster.ray_address, keep_logs_in=logs) as cluster:
        trainers = engines = None
        try:
            if trains(config):
                size = config.world_size
                per_rank = [
                    {"settings": settings, "rank": rank, "world_size": size, "init_method": "env://"}
                    for rank in range(size)
                ]
                trainers = RayWorkerGroup(FsdpTrainer, per_rank, cluster=cluster, role=ACTOR, collective=True)
            if rolls_out(config):
                num_engines = len(cluster.slots(ROLLOUT))
                device = "cuda" if cluster.accelerator == "GPU" else "cpu"
                engines = RayWorkerGroup(
                    LocalEngine,
                    [engine_kwargs(config) | {"device": device}] * num_engines,
                    cluster=cluster,
                    role=ROLLOUT,
                )
            if trainers is not None:
                trainers.call("init")
            yield Workers(trainers, engines)
        finally:
            for group in (engines, trainers):
                if group is not None:
                    group.shutdown()
