"""Handing the device to somebody else: model and optimizer leave for host memory and come back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from shared_runtime.training.fsdp import move_optimizer


class DeviceLease:
    """Moves what it was given off the device and back. On a CPU only the bookkeeping happens.

    Args:
        modules: Sharded models.
        optimizers: Their state moves too.
        device: Where they belong.
        offloaded: Under CPU offload everything lives on the host anyway.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        device: torch.device,
        *,
        offloaded: bool = False,
    ) -> None:
        self.modules, self.optimizers, self.device = list(modules), list(optimizers), device
        self.moves = device.type != "cpu" and not offloaded
        self.asleep = False

    def add(self, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Let another model, and its optimizer if it has one, come and go with the others."""
        self.modules.append(module)
        if optimizer is not None:
            self.optimizers.append(optimizer)

    def sleep(self) -> None:
        """Leave the device. Sleeping twice is allowed."""
        if not self.asleep and self.moves:
            self._move(torch.device("cpu"))
            torch.cuda.empty_cache()
        self.asleep = True

    def wake_up(self) -> None:
        """Come back."""
        if self.asleep and self.moves:
            self._move(self.device)
        self.asleep = False

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Awake inside the block, whatever it was before, and as before after it."""
        was_asleep = self.asleep
        self.wake_up()
        try:
            yield
        finally:
            if was_asleep:
                self.sleep()

    def require_awake(self, action: str) -> None:
        """Raise if asleep.

        Raises:
            RuntimeError: With what was tried.
        """
        if self.asleep:
            raise RuntimeError(f"the trainer sleeps: call wake_up before {action}")

    def _move(self, device: torch.device) -> None:
        for module in self.modules:
            for part in module.modules():
                reshard = getattr(part, "reshard", None)
                if reshard is not None:
                    reshard()
            module.to(device)
        for optimizer in self.optimizers:
            move_optimizer(optimizer, device)
