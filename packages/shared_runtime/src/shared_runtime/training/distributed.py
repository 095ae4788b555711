"""Process group, device and mesh of a trainer rank, from explicit arguments and never from environment variables."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# Trainers of one process (three runs in a notebook, an actor and its reference) share its single-rank group.
_single_rank_users = 0


@dataclass(frozen=True)
class RankContext:
    """Where a rank stands.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks.
        device: What this rank computes on.
        mesh: (dp_replicate, dp_shard).
    """

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """What `fully_shard` takes: one dimension, or two for hybrid sharding."""
        return self.mesh if self.mesh["dp_replicate"].size() > 1 else self.mesh["dp_shard"]


def start_rank(
    *,
    rank: int = 0,
    world_size: int = 1,
    init_method: str | None = None,
    dp_replicate_size: int = 1,
    device: str | torch.device | None = None,
    cpu_backend: str = "gloo",
) -> RankContext:
    """Join the process group and build the mesh.

    Args:
        rank: This process's rank.
        world_size: Number of ranks; 1 needs no `init_method`, no network and no environment.
        init_method: As in `torch.distributed.init_process_group`, e.g. `tcp://10.0.0.1:29500` or `file:///path`.
        dp_replicate_size: Replicas of the sharded model.
        device: Default: the current CUDA device where there is one, else the CPU.
        cpu_backend: Process-group backend for CPU tensors.

    Raises:
        ValueError: If the replicas don't divide the ranks, or several ranks have no `init_method`.
    """
    global _single_rank_users
    if world_size % dp_replicate_size:
        raise ValueError(f"--dp-replicate-size {dp_replicate_size} does not divide the {world_size} trainer ranks")
    if world_size > 1 and init_method is None:
        raise ValueError(f"{world_size} trainer ranks need an init_method, such as tcp://host:port")
    device = torch.device(device if device is not None else ("cuda" if torch.cuda.is_available() else "cpu"))
    backend = f"cpu:{cpu_backend},cuda:nccl" if device.type == "cuda" else cpu_backend
    if world_size == 1:
        if not dist.is_initialized():
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        elif dist.get_world_size() != 1:
            raise ValueError("this process already belongs to a process group of several ranks")
        _single_rank_users += 1
    else:
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)
    mesh = init_device_mesh(
        device.type, (dp_replicate_size, world_size // dp_replicate_size), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    return RankContext(rank, world_size, device, mesh)


def stop_rank(context: RankContext) -> None:
    """Leave the process group; the last trainer of a single-rank process closes it."""
    global _single_rank_users
    if context.world_size == 1:
        _single_rank_users -= 1
        if _single_rank_users > 0:
            return
    if dist.is_initialized():
        dist.destroy_process_group()
