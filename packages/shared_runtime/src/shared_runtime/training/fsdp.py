"""FSDP2: which modules are sharded and how, activation checkpointing, moving between devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from shared_runtime.precision.policy import PrecisionPolicy
from shared_runtime.training.distributed import RankContext


def find_blocks(module: nn.Module, class_names: Iterable[str] | None = None) -> list[nn.Module]:
    """The repeated blocks to be sharded one by one.

    Args:
        module: The model.
        class_names: Names of the block classes (`_no_split_modules` of transformers and diffusers models). Unset:
            every child of a `ModuleList` that isn't inside another such child.

    Raises:
        ValueError: If there is none.
    """
    if class_names is not None:
        names = set(class_names)
        blocks = [m for m in module.modules() if type(m).__name__ in names]
    else:
        lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
        nested = {inner for outer in lists for child in outer for inner in child.modules()}
        blocks = [child for outer in lists if outer not in nested for child in outer]
    if not blocks:
        wanted = f" of class {sorted(set(class_names))}" if class_names is not None else ""
        raise ValueError(f"{type(module).__name__} has no blocks{wanted} to shard")
    return blocks


def shard_model(
    module: nn.Module,
    context: RankContext,
    precision: PrecisionPolicy,
    *,
    blocks: Sequence[nn.Module],
    cpu_offload: bool = False,
    cast_forward_inputs: bool = True,
    overrides: Mapping[nn.Module, torch.dtype] | None = None,
) -> nn.Module:
    """Shard each block, then what remains at the root, in place. Gradients are summed over ranks, not averaged.

    The losses hold global denominators already, so a sum is the gradient of the whole batch, however unequal the
    ranks' shares are. `cast_forward_inputs` casts what a module is called with to the compute dtype. The modules of
    `overrides` are sharded by themselves, and compute in their own dtype.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute, reduce_dtype=precision.reduce, cast_forward_inputs=cast_forward_inputs
    )
    offload = CPUOffloadPolicy(pin_memory=context.device.type == "cuda") if cpu_offload else OffloadPolicy()
    for owner, dtype in (overrides or {}).items():
        own = replace(policy, param_dtype=dtype)
        fully_shard(owner, mesh=context.fsdp_mesh, mp_policy=own, offload_policy=offload)
    for block in blocks:
        fully_shard(block, mesh=context.fsdp_mesh, mp_policy=policy, offload_policy=offload)
    fully_shard(module, mesh=context.fsdp_mesh, mp_policy=policy, offload_policy=offload)
    for part in fsdp_parts(module):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)
    return module


def spread_model(
    module: nn.Module,
    context: RankContext,
    precision: PrecisionPolicy,
    *,
    blocks: Sequence[nn.Module],
    cpu_offload: bool = False,
    cast_forward_inputs: bool = True,
    overrides: Mapping[nn.Module, torch.dtype] | None = None,
) -> nn.Module:
    """:func:`shard_model` for a module whose weights only rank 0 has read; the others get their shards from it."""
    full = module.state_dict() if context.world_size > 1 and context.rank == 0 else {}
    shard_model(
        module,
        context,
        precision,
        blocks=blocks,
        cpu_offload=cpu_offload,
        cast_forward_inputs=cast_forward_inputs,
        overrides=overrides,
    )
    if context.world_size > 1:
        spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=cpu_offload)
        set_model_state_dict(module, full, options=spread)
        # Rotary frequencies and the like aren't part of a state dict, and weren't computed where weights stayed empty.
        for buffer in module.buffers():
            if not buffer.is_meta:
                dist.broadcast(buffer, src=0)
    return module


def fsdp_parts(module: nn.Module) -> list[FSDPModule]:
    """All modules that `fully_shard` wrapped, the root included."""
    return [m for m in module.modules() if isinstance(m, FSDPModule)]


def set_last_micro_batch(module: nn.Module, last: bool) -> None:
    """Under hybrid sharding, leave the all-reduce over replicas to the last micro-batch of a step."""
    if isinstance(module, FSDPModule):
        module.set_requires_all_reduce(last)


def disable_dropout(module: nn.Module) -> None:
    """Switch off dropout: log-probs must not change between two passes over the same weights."""
    for part in module.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0


def count_parameters(module: nn.Module) -> int:
    """Number of parameters, tied ones once."""
    return sum(p.numel() for p in module.parameters())


@torch.no_grad()
def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move the optimizer's state; step counters stay where they are."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim > 0:
                state[key] = value.to(device)
