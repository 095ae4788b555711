"""What training reports of the policy update, per token or over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shared_runtime.algorithms.masking import select

AllReduce = Callable[[Tensor], Tensor]


@dataclass(eq=False)
class MetricSums:
    """Named numbers in a form that merges exactly over micro-batches and ranks.

    Attributes:
        means: Numerator and denominator of each mean, float64 (2,).
        maxima: Largest values, float64 scalars.
        minima: Smallest values, float64 scalars.
    """

    means: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)
    minima: dict[str, Tensor] = field(default_factory=dict)

    def add_mean(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Add the mean of `values` over the entries that `mask` selects."""
        chosen = mask != 0
        pair = torch.stack([select(chosen, values.detach()).double().sum(), chosen.sum().double()])
        self.means[name] = self.means[name] + pair if name in self.means else pair

    def add_extremes(self, values: Tensor, mask: Tensor, *, maximum: str, minimum: str) -> None:
        """Add the largest and smallest selected value; nothing selected leaves them alone."""
        x = values.detach().double()
        nothing = x.new_full((1,), torch.inf)
        largest = torch.cat([select(mask, x, -torch.inf), -nothing, self.maxima.get(maximum, -nothing).view(1)])
        smallest = torch.cat([select(mask, x, torch.inf), nothing, self.minima.get(minimum, nothing).view(1)])
        self.maxima[maximum], self.minima[minimum] = largest.max(), smallest.min()

    def finish(
        self, all_reduce_sum: AllReduce | None = None, all_reduce_max: AllReduce | None = None
    ) -> dict[str, float]:
        """The numbers, over all ranks if reductions are given; a mean of nothing is 0. Every rank must call it."""
        out: dict[str, float] = {}
        if self.means:
            sums = torch.stack(list(self.means.values()))
            sums = all_reduce_sum(sums) if all_reduce_sum else sums
            values = sums[:, 0] / sums[:, 1].clamp(min=1)
            out.update(zip(self.means, values.tolist(), strict=True))
        if self.maxima or self.minima:
            extremes = torch.stack([*self.maxima.values(), *(-x for x in self.minima.values())])
            extremes = all_reduce_max(extremes) if all_reduce_max else extremes
            signs = [1] * len(self.maxima) + [-1] * len(self.minima)
            names = [*self.maxima, *self.minima]
            found = {n: s * x for n, s, x in zip(names, signs, extremes.tolist(), strict=True)}
            out.update({n: x if abs(x) != torch.inf else 0.0 for n, x in found.items()})
        return out


def merge_metrics(parts: Iterable[MetricSums]) -> MetricSums:
    """Metrics of several micro-batches as one."""
    merged = MetricSums()
    for part in parts:
        for name, pair in part.means.items():
            merged.means[name] = merged.means[name] + pair if name in merged.means else pair
        for name, x in part.maxima.items():
            merged.maxima[name] = torch.maximum(merged.maxima[name], x) if name in merged.maxima else x
        for name, x in part.minima.items():
            merged.minima[name] = torch.minimum(merged.minima[name], x) if name in merged.minima else x
    return merged


def ppo_kl(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """log π_old - log π_θ of each trainable token (`train/ppo_kl`), 0 elsewhere; (T,), no gradient."""
    return select(mask, old_log_probs.detach() - log_probs.detach())


def log_prob_abs_diff(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> Tensor:
    """|log π_train - log π_rollout| of each trainable token (`train/train_rollout_logprob_abs_diff`); (T,)."""
    return select(mask, log_probs.detach() - rollout_log_probs.detach()).abs()


def effective_sample_size(weights: Tensor, mask: Tensor, all_reduce_sum: AllReduce | None = None) -> Tensor:
    """(Σ w)² / (n · Σ w²) over the trainable tokens: 1 when all weights are equal, 1/n when one token has them all.

    Args:
        weights: (T,), non-negative.
        mask: (T,), non-zero means trainable.
        all_reduce_sum: Adds a tensor over ranks; with it the result is over all of them. Every rank must call.

    Returns:
        float64 scalar; 0 when nothing is trainable or every weight is 0.
    """
    w = select(mask, weights.detach()).double()
    sums = torch.stack([w.sum(), w.square().sum(), (mask != 0).sum().double()])
    if all_reduce_sum is not None:
        sums = all_reduce_sum(sums)
    total, squares, count = sums.unbind()
    return total.square() / (count * squares).clamp(min=torch.finfo(torch.float64).tiny)
