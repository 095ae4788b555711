"""Weights on their way out of sharded models: described, gathered, packed into buckets, checksummed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shared_runtime.training.lora import LoraWeight
from shared_runtime.weight_sync.bucket import Bucket, TensorMeta, pack, tensor_meta
from shared_runtime.weight_sync.checksum import tensor_checksums

Tensors = Mapping[str, Tensor | LoraWeight]


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters under the model's own names, tied ones once; persistent buffers too."""
    named: dict[str, Tensor] = dict(model.named_parameters())
    persistent = model.state_dict().keys()
    named |= {name: b for name, b in model.named_buffers() if name in persistent}
    return named


def weight_metadata(tensors: Tensors, dtype: torch.dtype) -> list[TensorMeta]:
    """What :func:`export_bucket` can give, in order."""
    shaped = {name: t.base if isinstance(t, LoraWeight) else t for name, t in tensors.items()}
    return [tensor_meta(name, t, _published_dtype(t, dtype)) for name, t in shaped.items()]


def export_bucket(
    tensors: Tensors, names: tuple[str, ...], index: int, dtype: torch.dtype, *, keep: bool
) -> Bucket | None:
    """Gather some tensors on all ranks; pack them where `keep` is set.

    Raises:
        KeyError: For names that the model doesn't have; all of them are listed.
    """
    gathered = gather_tensors(tensors, names, dtype, keep=keep)
    if keep:
        return pack(index, gathered)
    for _ in gathered:
        pass
    return None


def weight_checksums(tensors: Tensors, dtype: torch.dtype, *, keep: bool) -> dict[str, str] | None:
    """SHA-256 of every tensor, gathered one after the other; `None` where `keep` is not set."""
    checksums = tensor_checksums(gather_tensors(tensors, tuple(tensors), dtype, keep=keep))
    return checksums if keep else None


@torch.no_grad()
def gather_tensors(
    tensors: Tensors, names: tuple[str, ...], dtype: torch.dtype, *, keep: bool
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors one after the other, on every rank; nothing is yielded where `keep` is not set.

    Raises:
        KeyError: For names that the model doesn't have; all of them are listed.
    """
    unknown = [name for name in names if name not in tensors]
    if unknown:
        raise KeyError(f"the model has no tensors named {', '.join(unknown)}")
    for name in names:
        entry = tensors[name]
        tensor = entry.merged() if isinstance(entry, LoraWeight) else entry
        # Casting the shard first halves what travels for bf16.
        tensor = tensor.detach().to(_published_dtype(tensor, dtype))
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            yield name, full


def unsharded_class(model: nn.Module) -> type[nn.Module]:
    """The model's own class: `fully_shard` puts one of its own before it."""
    return type(model).__mro__[2]


def _published_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype
