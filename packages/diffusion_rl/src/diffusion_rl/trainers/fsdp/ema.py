"""The moving average of a sharded model: the policy that sampled, for DiffusionNFT, or smoother weights to publish."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from diffusion_rl.algorithms.ema import ema_update_


class WeightAverage:
    """Averages of a model's trainable parameters, sharded like them. It starts as a copy.

    Args:
        model: A sharded model.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.averages: dict[str, Tensor] = {
            name: parameter.detach().clone() for name, parameter in model.named_parameters() if parameter.requires_grad
        }

    def update(self, decay: float) -> None:
        """average ← decay·average + (1 - decay)·parameter."""
        ema_update_(map(_local, self.averages.values()), map(_local, self._parameters()), decay)

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """The model computes with the averages inside the block, and has its own weights again after it."""
        self.model.reshard()
        kept = [_local(parameter).clone() for parameter in self._parameters()]
        self._write([_local(average) for average in self.averages.values()])
        try:
            yield
        finally:
            # FSDP may hold gathered copies of the averages, which no later forward must read.
            self.model.reshard()
            self._write(kept)

    def move(self, device: torch.device) -> None:
        """Bring the averages to a device."""
        self.averages = {name: average.to(device) for name, average in self.averages.items()}

    def _parameters(self) -> list[Tensor]:
        parameters = dict(self.model.named_parameters())
        return [parameters[name].detach() for name in self.averages]

    @torch.no_grad()
    def _write(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self._parameters(), values, strict=True):
            _local(parameter).copy_(value)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
