"""The gradient norm over all ranks, and clipping to it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """This rank's shards of the gradients."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [g.to_local() if isinstance(g, DTensor) else g for g in gradients]


@torch.no_grad()
def gradient_norm(gradients: list[torch.Tensor], shard_mesh: DeviceMesh) -> float:
    """Euclidean norm of the whole gradient.

    Args:
        gradients: This rank's shards. Replicas hold equal shards, so only the shards of one replica are added up.
        shard_mesh: The dimension over which gradients are sharded.
    """
    filled = [g for g in gradients if g.numel()]
    device = gradients[0].device if gradients else torch.device("cpu")
    total = torch.zeros((), dtype=torch.float64, device=device)
    if filled:
        total = torch.stack(torch._foreach_norm(filled)).double().square().sum()
    if shard_mesh.size() > 1:
        # With CPU offload the gradients live on the host, but the mesh's own backend may want device tensors.
        total = total.to(shard_mesh.device_type)
        dist.all_reduce(total, group=shard_mesh.get_group())
    return float(total.sqrt())


@torch.no_grad()
def clip_gradients(gradients: list[torch.Tensor], norm: float, max_norm: float) -> None:
    """Scale gradients of norm `norm` down to `max_norm`, in place; 0 switches clipping off.

    The factor is max_norm / (norm + 1e-6), as in `torch.nn.utils.clip_grad_norm_` and Megatron-LM.
    """
    factor = max_norm / (norm + 1e-6)
    if max_norm > 0 and factor < 1.0:
        torch._foreach_mul_(gradients, factor)
