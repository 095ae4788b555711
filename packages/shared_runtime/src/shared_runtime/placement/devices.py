"""What Ray is asked for one worker, and which GPUs the worker sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared_runtime.placement.cluster import Cluster, Slot


def actor_options(cluster: Cluster, slot: Slot) -> dict[str, Any]:
    """Ray actor options that put a worker at its place and reserve its share of the accelerator."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(
        placement_group=slot.placement_group, placement_group_bundle_index=slot.bundle_index
    )
    gpu = cluster.accelerator == "GPU"
    return {
        "num_gpus": slot.share if gpu else 0,
        "num_cpus": 0 if gpu else slot.share,
        "max_restarts": 0,
        "scheduling_strategy": strategy,
    }


def visible_devices(cluster: Cluster, slots: Sequence[Slot]) -> list[dict[str, str]]:
    """Environment that shows each worker the GPUs of all its bundles on its node.

    Ray itself shows a worker the GPU of the one bundle that its actor is in, which is right for workers of one
    bundle: for these, and without GPUs, there is nothing to set.
    """
    if cluster.accelerator != "GPU":
        return [{} for _ in slots]
    import ray

    probe = ray.remote(_gpu_ids)
    pending = []
    for slot in slots:
        first_bundle = slot.bundles[0]
        on_node = [bundle for bundle in slot.bundles if cluster.layout.node_of(bundle) == slot.node]
        refs = []
        for bundle in on_node if len(slot.bundles) > 1 else []:
            index = slot.bundle_index + bundle - first_bundle
            place = Slot(slot.placement_group, index, 0.0001, slot.node, (bundle,))
            options = actor_options(cluster, place)
            del options["max_restarts"]
            refs.append(probe.options(**options).remote())
        pending.append(refs)
    ids = [[gpu for found in ray.get(refs) for gpu in found] for refs in pending]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {} for gpus in ids]


def _gpu_ids() -> list[str]:
    import ray

    return [str(gpu) for gpu in ray.get_gpu_ids()]
