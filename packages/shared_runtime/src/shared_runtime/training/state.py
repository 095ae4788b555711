"""The trainer's part of a checkpoint: weights, optimizer and schedule, loadable at any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from shared_runtime.training.optimizer import resume_schedule


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state under parameter names: `model.norm.weight.exp_avg`."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}.{key}": value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, Tensor)
    }


@torch.no_grad()
def fill_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Give a fresh optimizer the state that it would have before its first step, so that it can be loaded into."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return  # plain SGD has none
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def save_state(
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: LambdaLR,
    directory: Path,
    extra: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> None:
    """Write this rank's shards of `tensors` (the weights), optimizer, schedule and what a trainer has besides.

    Every rank must call.
    """
    from shared_runtime.checkpoint.sharded import save_sharded

    fill_optimizer(optimizer)
    save_sharded(_state(tensors, model, optimizer, schedule) | _plain(extra), directory)


def load_state(
    tensors: Mapping[str, Tensor],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: LambdaLR,
    directory: Path,
    extra: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> None:
    """Read what `save_state` wrote, in place. Every rank must call."""
    from shared_runtime.checkpoint.sharded import load_sharded

    fill_optimizer(optimizer)
    state = _state(tensors, model, optimizer, schedule) | _plain(extra)
    load_sharded(state, directory)
    resume_schedule(schedule, int(state["schedule"]["step"]))


def _state(
    tensors: Mapping[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer, schedule: LambdaLR
) -> dict[str, Any]:
    return {
        "model": {name: tensor.detach() for name, tensor in tensors.items()},
        "optimizer": optimizer_tensors(model, optimizer),
        "schedule": {"step": torch.tensor(schedule.last_epoch)},
    }


def _plain(extra: Mapping[str, Mapping[str, Tensor]] | None) -> dict[str, Any]:
    return {group: dict(tensors) for group, tensors in (extra or {}).items()}
