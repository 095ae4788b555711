"""A ragged micro-batch with everything that goes wrong: an empty sample, a fully masked one, holes in the mask."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from llm_rl.algorithms.segments import Segments


@dataclass
class Ragged:
    lengths: list[int]
    mask: torch.Tensor
    segments: Segments
    generator: torch.Generator

    def randn(self, scale: float = 1.0, *, per_sample: bool = False, grad: bool = False) -> torch.Tensor:
        n = len(self.lengths) if per_sample else sum(self.lengths)
        x = torch.randn(n, dtype=torch.float64, generator=self.generator) * scale
        return x.requires_grad_(grad)

    def log_probs(self, scale: float = 1.0, *, grad: bool = False) -> torch.Tensor:
        return (-self.randn(scale).abs()).requires_grad_(grad)

    def spoiled(self, x: torch.Tensor, value: float) -> torch.Tensor:
        """`x` with `value` at every masked token."""
        return torch.where(self.mask == 0, torch.full_like(x, value), x.detach()).requires_grad_(x.requires_grad)

    def samples(self, x: torch.Tensor) -> list[torch.Tensor]:
        return list(x.split(self.lengths))


@pytest.fixture
def ragged() -> Ragged:
    lengths = [4, 0, 3, 1, 6, 5]
    mask = torch.tensor([*[1, 1, 1, 1], *[0, 0, 0], *[1], *[1, 0, 0, 1, 1, 0], *[0, 1, 0, 1, 1]])
    return Ragged(lengths, mask, Segments.of(lengths), torch.Generator().manual_seed(0))


SPOILS = [float("nan"), float("inf"), -float("inf"), 1e30]
