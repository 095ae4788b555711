"""What each of several gloo ranks does in test_checkpoint_sharded."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shared_runtime.checkpoint.rng import load_rng, save_rng
from shared_runtime.checkpoint.sharded import load_sharded, save_sharded


def whole_state(fill: float | None = None) -> dict[str, dict[str, torch.Tensor]]:
    """Weights with a first dimension that 2 and 4 ranks split unevenly, moments, and a scalar that all ranks hold."""
    weight = torch.arange(7 * 3, dtype=torch.float32).reshape(7, 3) / 3
    moments = weight.double().exp().to(torch.bfloat16)
    state = {"model": {"w": weight, "b": torch.arange(5.0)}, "optimizer": {"w.exp_avg": moments}}
    state["schedule"] = {"step": torch.tensor(12)}
    if fill is not None:
        state = {key: {name: torch.full_like(t, fill) for name, t in part.items()} for key, part in state.items()}
    return state


def sharded(state: dict[str, dict[str, torch.Tensor]], world_size: int) -> dict[str, dict[str, torch.Tensor]]:
    """The same, with every tensor but scalars split over the ranks."""
    mesh = init_device_mesh("cpu", (world_size,))

    def split(tensor: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(tensor, mesh, [Shard(0)]) if tensor.dim() else tensor

    return {key: {name: split(tensor) for name, tensor in part.items()} for key, part in state.items()}


def assert_equal(state: dict[str, dict[str, torch.Tensor]]) -> None:
    """Every value is bit-identical to `whole_state`."""
    for key, part in whole_state().items():
        for name, expected in part.items():
            found = state[key][name]
            found = found.full_tensor() if isinstance(found, DTensor) else found
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected), f"{key}.{name}"


def main(rank: int, world_size: int, meeting: Path, load: Path | None, save: Path | None) -> None:
    """Load (and compare) or make the state, then save it."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    if load is not None:
        state = sharded(whole_state(fill=-1), world_size)
        load_sharded(state, load)
        assert_equal(state)
        assert load_rng(load, rank) is (rank < 2)
        if rank < 2:
            assert torch.rand(1) == _draw(rank, skip=1)
    if save is not None:
        torch.manual_seed(rank)
        torch.rand(1)
        save_sharded(sharded(whole_state(), world_size), save)
        save_rng(save, rank)
    dist.barrier()
    dist.destroy_process_group()


def _draw(seed: int, skip: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(skip + 1, generator=generator)[-1]
