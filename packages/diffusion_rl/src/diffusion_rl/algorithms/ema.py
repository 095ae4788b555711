"""The moving average of the weights: its schedule and its update."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def ema_decay(
    step: int, *, decay_init: float = 0.001, decay_ramp: float = 0.001, decay_max: float = 0.5, flat_steps: int = 0
) -> float:
    """d after `step` optimizer steps: `decay_init` while step < `flat_steps`, then min(ramp·(step - flat), max).

    The ramp starts from zero again, so with `flat_steps` 0 the first update copies the weights.

    Args:
        step: Optimizer steps taken so far.
        decay_init: `--ema-decay-init`.
        decay_ramp: `--ema-decay-ramp`.
        decay_max: `--ema-decay-max`.
        flat_steps: `--ema-decay-flat-steps`.

    Paper: DiffusionNFT, arXiv:2509.16117.
    """
    if step < flat_steps:
        return decay_init
    return min(decay_ramp * (step - flat_steps), decay_max)


@torch.no_grad()
def ema_update_(averages: Iterable[Tensor], parameters: Iterable[Tensor], decay: float) -> None:
    """average ← d·average + (1-d)·parameter, in place and in the average's dtype; d = 0 copies exactly.

    Raises:
        ValueError: If `decay` is not in [0, 1], or the two have different lengths.
    """
    if not 0.0 <= decay <= 1.0:
        raise ValueError(f"the EMA's decay must lie in [0, 1], not {decay}")
    for average, parameter in zip(averages, parameters, strict=True):
        if decay == 0.0:
            average.copy_(parameter)
        else:
            average.mul_(decay).add_(parameter.to(average.dtype), alpha=1.0 - decay)
