"""Two helpers that every function over latents needs."""

from __future__ import annotations

import torch
from torch import Tensor


def per_sample(value: Tensor, like: Tensor) -> Tensor:
    """A (B,) or scalar tensor as (B, 1, ..., 1) or (), so that it broadcasts over the latent dimensions of `like`.

    Raises:
        ValueError: If the batch sizes differ.
    """
    if value.ndim == 0:
        return value
    if value.ndim != 1 or value.shape[0] not in (1, like.shape[0]):
        raise ValueError(f"expected one value for each of {like.shape[0]} samples, got shape {tuple(value.shape)}")
    return value.reshape(-1, *([1] * (like.ndim - 1)))


def latent_mean(values: Tensor) -> Tensor:
    """Mean over all latent dimensions: (B, ...) to (B,)."""
    return values.flatten(1).mean(dim=1)


def at_least_float32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in their common dtype, raised to float32 where it is narrower."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return tuple(tensor.to(dtype) for tensor in tensors)
