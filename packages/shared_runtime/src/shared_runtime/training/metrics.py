"""Numbers of a rollout's training, reduced over all ranks without ever averaging averages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class RunningMetrics:
    """What one rank has measured of a rollout. Every rank must add the same keys, with zeros where it has nothing."""

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}
        self._means: dict[str, Tensor] = {}
        self._constants: dict[str, list[float]] = {}
        self._maxima: dict[str, Tensor] = {}

    def add_part(self, key: str, value: Tensor) -> None:
        """Add a micro-batch's part of a step's mean: the step's denominator over all ranks is in it already."""
        self._accumulate(self._parts, key, value)

    def add_mean(self, key: str, numerator: Tensor, denominator: Tensor) -> None:
        """Add to a mean over the rollout."""
        self._accumulate(self._means, key, torch.stack([numerator.double(), denominator.double()]))

    def add_max(self, key: str, value: Tensor) -> None:
        """Add to a maximum over the rollout and all ranks."""
        value = value.detach().double()
        self._maxima[key] = torch.maximum(self._maxima[key], value) if key in self._maxima else value

    def add_constant(self, key: str, value: float) -> None:
        """Add a step's number that all ranks know already."""
        self._constants.setdefault(key, []).append(value)

    def reduce(
        self,
        all_reduce_sum: Callable[[Tensor], Tensor],
        num_steps: int,
        all_reduce_max: Callable[[Tensor], Tensor] | None = None,
    ) -> dict[str, float]:
        """The means over steps and ranks; a mean whose denominator is 0 on every rank is left out.

        `all_reduce_max` is needed where there are maxima.
        """
        parts, means = sorted(self._parts), sorted(self._means)
        values = [self._parts[k].reshape(1) for k in parts] + [self._means[k] for k in means]
        total = all_reduce_sum(torch.cat(values)).tolist() if values else []
        result = {key: sum(c) / len(c) for key, c in self._constants.items()}
        result |= {key: value / num_steps for key, value in zip(parts, total, strict=False)}
        for i, key in enumerate(means):
            numerator, denominator = total[len(parts) + 2 * i : len(parts) + 2 * i + 2]
            if denominator:
                result[key] = numerator / denominator
        if self._maxima and all_reduce_max is not None:
            names = sorted(self._maxima)
            largest = all_reduce_max(torch.stack([self._maxima[name] for name in names])).tolist()
            result |= dict(zip(names, largest, strict=True))
        return result

    @staticmethod
    def _accumulate(store: dict[str, Tensor], key: str, value: Tensor) -> None:
        value = value.detach().double()
        store[key] = store[key] + value if key in store else value
