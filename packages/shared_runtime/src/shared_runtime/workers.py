"""The workers of a run: trainer ranks and rollout engines, in Ray actors or in this process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared_runtime.config import ClusterConfig, DebugConfig
from shared_runtime.placement.groups import InProcessGroup, WorkerGroup
from shared_runtime.placement.layout import ACTOR, ROLLOUT, Layout, Pool, lay_out, plan_layout


@dataclasses.dataclass
class Workers:
    """The run's groups; a rollout-only run has no trainers, a train-only run no engines."""

    trainers: WorkerGroup | None
    engines: WorkerGroup | None


@dataclasses.dataclass(frozen=True)
class WorkerClasses:
    """What a domain's workers are.

    Attributes:
        trainer: Called with `settings`, and with `rank`, `world_size` and `init_method` where ranks are processes.
        trainer_settings: The same on every rank.
        engine: Called with `engine_kwargs`, and with `device` where engines are processes.
        engine_kwargs: The same for every engine.
    """

    trainer: type
    trainer_settings: Any
    engine: type
    engine_kwargs: dict[str, Any]


def layout_of(cluster: ClusterConfig, debug: DebugConfig) -> Layout:
    """Which bundles trainers and engines take; halves of a run that are switched off take none.

    Raises:
        LayoutError: If the counts make no layout.
    """
    if debug.trains and debug.rolls_out:
        return plan_layout(
            colocate=cluster.colocate,
            actor_num_nodes=cluster.actor_num_nodes,
            actor_num_gpus_per_node=cluster.actor_num_gpus_per_node,
            rollout_num_gpus=cluster.rollout_num_gpus,
            rollout_num_gpus_per_engine=cluster.rollout_num_gpus_per_engine,
            num_gpus_per_node=cluster.num_gpus_per_node,
        )
    nodes = (cluster.actor_num_gpus_per_node,) * cluster.actor_num_nodes
    return lay_out([Pool(nodes, {ACTOR: 1} if debug.trains else {ROLLOUT: cluster.rollout_num_gpus_per_engine})])


@contextlib.contextmanager
def in_process_workers(classes: WorkerClasses, debug: DebugConfig) -> Iterator[Workers]:
    """One trainer rank and one engine in this process, without Ray."""
    trainers = InProcessGroup(classes.trainer(classes.trainer_settings)) if debug.trains else None
    engines = InProcessGroup(classes.engine(**classes.engine_kwargs)) if debug.rolls_out else None
    if trainers is not None:
        trainers.call("init")
    try:
        yield Workers(trainers, engines)
    finally:
        for group in (engines, trainers):
            if group is not None:
                group.shutdown()


@contextlib.contextmanager
def ray_workers(
    classes: WorkerClasses, cluster_config: ClusterConfig, debug: DebugConfig, logs: Path
) -> Iterator[Workers]:
    """Ray actors on a running cluster, or on a local one that starts and ends with the block."""
    from shared_runtime.placement.cluster import ray_cluster
    from shared_runtime.placement.ray_group import RayWorkerGroup

    layout = layout_of(cluster_config, debug)
    with ray_cluster(layout, address=cluster_config.ray_address, keep_logs_in=logs) as cluster:
        trainers = engines = None
        try:
            if debug.trains:
                size = cluster_config.actor_num_nodes * cluster_config.actor_num_gpus_per_node
                per_rank = [
                    {"settings": classes.trainer_settings, "rank": rank, "world_size": size, "init_method": "env://"}
                    for rank in range(size)
                ]
                trainers = RayWorkerGroup(classes.trainer, per_rank, cluster=cluster, role=ACTOR, collective=True)
            if debug.rolls_out:
                num_engines = len(cluster.slots(ROLLOUT))
                device = "cuda" if cluster.accelerator == "GPU" else "cpu"
                engines = RayWorkerGroup(
                    classes.engine,
                    [classes.engine_kwargs | {"device": device}] * num_engines,
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
