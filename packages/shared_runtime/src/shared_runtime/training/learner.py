"""A model that trains, with its optimizer and learning-rate schedule. A trainer has one for each such model."""

from __future__ import annotations

import math

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shared_runtime.training.gradients import clip_gradients, gradient_norm, local_gradients
from shared_runtime.training.optimizer import build_optimizer, build_schedule
from shared_runtime.training.settings import FsdpSettings


class Learner:
    """Optimizer and schedule of a sharded model, and the step that they take.

    Args:
        model: Sharded.
        settings: Optimizer, schedule and clipping.
        shard_mesh: The dimension over which gradients are sharded.
        lr: Peak learning rate. Unset: the settings'.
        warmup_steps: Unset: the settings'.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: FsdpSettings,
        shard_mesh: DeviceMesh,
        *,
        lr: float | None = None,
        warmup_steps: int | None = None,
    ) -> None:
        self.model, self.settings, self.shard_mesh = model, settings, shard_mesh
        peak = settings.lr if lr is None else lr
        self.optimizer = build_optimizer(
            model.named_parameters(),
            kind=settings.optimizer,
            lr=peak,
            weight_decay=settings.weight_decay,
            betas=(settings.adam_beta1, settings.adam_beta2),
            eps=settings.adam_eps,
        )
        self.schedule = build_schedule(
            self.optimizer,
            lr=peak,
            min_lr=min(settings.min_lr, peak),
            decay_style=settings.lr_decay_style,
            warmup_steps=settings.lr_warmup_iters if warmup_steps is None else warmup_steps,
            decay_steps=settings.lr_decay_iters,
        )

    def step(self, name: str) -> tuple[float, float]:
        """Clip the accumulated gradient, take the step, advance the schedule.

        Args:
            name: Of the step, for messages.

        Returns:
            The gradient's norm before clipping, and the learning rate of the step.

        Raises:
            FloatingPointError: For a gradient that isn't finite, before it reaches the weights.
        """
        gradients = local_gradients(self.model.parameters())
        norm = gradient_norm(gradients, self.shard_mesh)
        if self.settings.check_for_nan_in_loss_and_grad and not math.isfinite(norm):
            self.optimizer.zero_grad()
            raise FloatingPointError(
                f"{name}: the gradient norm is {norm}; the weights were left as they are "
                "(--no-check-for-nan-in-loss-and-grad skips this check)"
            )
        clip_gradients(gradients, norm, self.settings.clip_grad)
        rate = float(self.schedule.get_last_lr()[0])
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return norm, rate
