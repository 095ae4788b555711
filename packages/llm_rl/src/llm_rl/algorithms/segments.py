"""Which token belongs to which sample of a ragged micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shared_runtime.algorithms.masking import select


@dataclass(frozen=True, eq=False)
class Segments:
    """The borders of B samples in a tensor of T response tokens.

    Attributes:
        lengths: int64 (B,); zero is allowed.
        ids: int64 (T,), the sample of each token, ascending.
    """

    lengths: Tensor
    ids: Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device | str | None = None) -> Segments:
        """Build from the number of response tokens of each sample."""
        counts = torch.tensor(list(lengths), dtype=torch.int64, device=device)
        samples = torch.arange(len(lengths), dtype=torch.int64, device=device)
        return cls(counts, torch.repeat_interleave(samples, counts, output_size=sum(lengths)))

    @property
    def num_samples(self) -> int:
        """B."""
        return self.lengths.numel()

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.ids.numel()

    def sum(self, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """Sum (T,) within each sample, over the tokens that `mask` selects; (B,)."""
        if mask is not None:
            values = select(mask, values)
        return values.new_zeros(self.num_samples).index_add(0, self.ids, values)

    def count(self, mask: Tensor) -> Tensor:
        """Number of selected tokens of each sample; float32 (B,)."""
        return self.sum((mask != 0).float())

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """Mean over the selected tokens of each sample, 0 where there are none; (B,)."""
        return self.sum(values, mask) / self.count(mask).clamp(min=1).to(values.dtype)

    def expand(self, per_sample: Tensor) -> Tensor:
        """Repeat (B,) over the tokens of each sample; (T,)."""
        return per_sample[self.ids]

    def last(self, mask: Tensor) -> Tensor:
        """Where each sample's last selected token is, as a bool mask (T,); a sample without one marks nothing."""
        selected = mask != 0
        positions = torch.arange(self.num_tokens, device=self.ids.device)
        # A sample with nothing selected keeps -1, which no position equals.
        last = torch.full_like(self.lengths, -1)
        last = last.scatter_reduce(0, self.ids, torch.where(selected, positions, -1), reduce="amax")
        return positions == last[self.ids]
