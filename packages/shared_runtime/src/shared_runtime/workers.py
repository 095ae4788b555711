"""The workers of a run: trainer ranks, rollout engines and scorers, in Ray actors or in this process."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shared_runtime.config import ClusterConfig, DebugConfig, RewardPoolConfig
from shared_runtime.placement.groups import InProcessGroup, WorkerGroup
from shared_runtime.placement.layout import ACTOR, REWARD, ROLLOUT, Layout, Pool, lay_out, plan_layout

if TYPE_CHECKING:
    from shared_runtime.placement.cluster import Cluster

_POOL_TIMEOUT_S = 60.0


class ScoringPool(Protocol):
    """Workers that score, as a run starts and ends them; what they are asked is between them and the domain."""

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until every worker has its place; `TimeoutError` where that can't be."""

    def shutdown(self) -> None:
        """End them."""


@dataclasses.dataclass
class Workers:
    """The run's groups; a rollout-only run has no trainers, a train-only run no engines, most runs no reward pool."""

    trainers: WorkerGroup | None
    engines: WorkerGroup | None
    reward_pool: Any = None


@dataclasses.dataclass(frozen=True)
class WorkerClasses:
    """What a domain's workers are.

    Attributes:
        trainer: Called with `settings`, and with `rank`, `world_size` and `init_method` where ranks are processes.
        trainer_settings: The same on every rank.
        engine: Called with `engine_kwargs`, and with `device` where engines are processes.
        engine_kwargs: The same for every engine.
        reward_pool: Starts workers that score, given `num_cpus_per_worker`, `num_gpus_per_worker` and
            `placement_group`.
    """

    trainer: type
    trainer_settings: Any
    engine: type
    engine_kwargs: dict[str, Any]
    reward_pool: Callable[..., ScoringPool] | None = None


def layout_of(cluster: ClusterConfig, debug: DebugConfig, pool: RewardPoolConfig) -> Layout:
    """Which bundles trainers, engines and colocated scorers take; halves of a run that are switched off take none.

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
            shared_roles=(REWARD,) if pool.reward_colocate else (),
        )
    nodes = (cluster.actor_num_gpus_per_node,) * cluster.actor_num_nodes
    return lay_out([Pool(nodes, {ACTOR: 1} if debug.trains else {ROLLOUT: cluster.rollout_num_gpus_per_engine})])


@contextlib.contextmanager
def in_process_workers(classes: WorkerClasses, debug: DebugConfig) -> Iterator[Workers]:
    """One trainer rank and one engine in this process, without Ray."""
    trainers = engines = None
    try:
        if debug.trains:
            trainers = InProcessGroup(classes.trainer(classes.trainer_settings))
            trainers.call("init")
        if debug.rolls_out:
            engines = InProcessGroup(classes.engine(**classes.engine_kwargs))
        yield Workers(trainers, engines)
    finally:
        for group in (engines, trainers):
            if group is not None:
                group.shutdown()


@contextlib.contextmanager
def ray_workers(
    classes: WorkerClasses, cluster_config: ClusterConfig, debug: DebugConfig, pool: RewardPoolConfig, logs: Path
) -> Iterator[Workers]:
    """Ray actors on a running cluster, or on a local one that starts and ends with the block."""
    from shared_runtime.placement.cluster import ray_cluster
    from shared_runtime.placement.ray_group import RayWorkerGroup

    scores = classes.reward_pool if pool.reward_num_workers and debug.rolls_out else None
    layout = layout_of(cluster_config, debug, pool)
    further_cpus = pool.reward_num_workers * pool.reward_num_cpus_per_worker if scores is not None else 0.0
    with ray_cluster(
        layout, address=cluster_config.ray_address, further_cpus=further_cpus, keep_logs_in=logs
    ) as cluster:
        trainers = engines = rewards = None
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
            if scores is not None:
                rewards = scores(**_seats(cluster, pool))
            if trainers is not None:
                trainers.call("init")
            if rewards is not None:
                _wait_ready(rewards)
            yield Workers(trainers, engines, rewards)
        finally:
            for group in (rewards, engines, trainers):
                if group is not None:
                    group.shutdown()


def _seats(cluster: Cluster, pool: RewardPoolConfig) -> dict[str, Any]:
    """What a scorer reserves: its own CPUs and GPUs, or its share of a bundle of the layout."""
    if REWARD not in cluster.layout.roles:
        shares = {
            "num_cpus_per_worker": pool.reward_num_cpus_per_worker,
            "num_gpus_per_worker": pool.reward_num_gpus_per_worker,
        }
        return shares | {"placement_group": None}
    slot, gpu = cluster.slots(REWARD)[0], cluster.accelerator == "GPU"
    return {
        "num_cpus_per_worker": 0.0 if gpu else slot.share,
        "num_gpus_per_worker": slot.share if gpu else 0.0,
        "placement_group": slot.placement_group,
    }


def _wait_ready(rewards: ScoringPool) -> None:
    from shared_runtime.placement.cluster import ClusterError

    try:
        rewards.wait_ready(_POOL_TIMEOUT_S)
    except TimeoutError as error:
        raise ClusterError(
            f"{error}; lower --reward-num-workers or what each reserves (--reward-num-cpus-per-worker, "
            "--reward-num-gpus-per-worker), or seat them with --reward-colocate"
        ) from error
