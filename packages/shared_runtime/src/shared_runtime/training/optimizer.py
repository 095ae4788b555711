"""The optimizer and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

DecayStyle = Literal["constant", "linear", "cosine"]


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    kind: Literal["adam", "sgd"] = "adam",
    lr: float,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """AdamW (decoupled decay) or SGD without momentum (decay added to the gradient) over the trainable parameters.

    Parameters with one dimension (biases and the scales of norms) aren't decayed, as in Megatron-LM and the Hugging
    Face trainer. AdamW runs its fused kernel, which on a CPU costs a third of the per-tensor operations.

    Raises:
        ValueError: If nothing is trainable or `kind` is unknown.
    """
    trainable = [(name, p) for name, p in named_parameters if p.requires_grad]
    if not trainable:
        raise ValueError("no trainable parameter")
    groups = [
        {"params": [p for _, p in trainable if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for _, p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if kind == "adam":
        return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=lr, foreach=True)  # sharded tensors have no fused SGD
    raise ValueError(f"--optimizer must be adam or sgd, not {kind!r}")


def learning_rate(
    step: int,
    *,
    lr: float,
    min_lr: float = 0.0,
    decay_style: DecayStyle = "constant",
    warmup_steps: int = 0,
    decay_steps: int | None = None,
) -> float:
    """The learning rate of optimizer step `step` (the first is 0).

    Warm-up rises linearly from 0, so that step 0 of a warm-up changes nothing (as Megatron-LM and transformers do);
    then the rate stays, or falls to `min_lr` at step `decay_steps` along a line or half a cosine, and stays there.

    Raises:
        ValueError: For an unknown style, or a decay that ends before the warm-up does.
    """
    if step < warmup_steps:
        return lr * step / warmup_steps
    if decay_style == "constant":
        return lr
    if decay_steps is None or decay_steps <= warmup_steps:
        raise ValueError(
            f"--lr-decay-style {decay_style} needs more --lr-decay-iters ({decay_steps}) than --lr-warmup-iters "
            f"({warmup_steps})"
        )
    progress = min((step - warmup_steps) / (decay_steps - warmup_steps), 1.0)
    if decay_style == "linear":
        factor = 1.0 - progress
    elif decay_style == "cosine":
        factor = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        raise ValueError(f"--lr-decay-style must be constant, linear or cosine, not {decay_style!r}")
    return min_lr + (lr - min_lr) * factor


def build_schedule(
    optimizer: torch.optim.Optimizer,
    *,
    lr: float,
    min_lr: float = 0.0,
    decay_style: DecayStyle = "constant",
    warmup_steps: int = 0,
    decay_steps: int | None = None,
) -> LambdaLR:
    """:func:`learning_rate` as a scheduler; call `step()` once after each optimizer step."""

    def factor(step: int) -> float:
        rate = learning_rate(
            step,
            lr=lr,
            min_lr=min_lr,
            decay_style=decay_style,
            warmup_steps=warmup_steps,
            decay_steps=decay_steps,
        )
        return rate / lr if lr else 1.0

    return LambdaLR(optimizer, factor)


def resume_schedule(schedule: LambdaLR, step: int) -> None:
    """Put a schedule where it stands after `step` optimizer steps."""
    rates = [base * factor(step) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule.last_epoch, schedule._last_lr = step, rates
