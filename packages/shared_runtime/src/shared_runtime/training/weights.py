"""Weights on their way out of sharded models: described, gathered, packed into buckets, checksummed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shared_runtime.training.lora import LoraWeight
from shared_runtime.weight_sync.bucket import Bucket, TensorMeta, pack, tensor_meta
from shared_runtime.weight_sync.checksum import tensor_checksums

Tensors = Mapping[str, Tensor | LoraWeight]


@dataclass(frozen=True)
class PublishDtypes:
    """In which dtype floating-point weights leave the trainer.

    Attributes:
        default: Of all that have no own one.
        own: Those of single weights, by name.
    """

    default: torch.dtype
    own: Mapping[str, torch.dtype] = field(default_factory=dict)

    def of(self, name: str, tensor: Tensor) -> torch.dtype:
        """The dtype of a weight; what isn't floating point stays as it is."""
        return self.own.get(name, self.default) if tensor.is_floating_point() else tensor.dtype


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters under the model's own names, tied ones once; persistent buffers too."""
    named: dict[str, Tensor] = dict(model.named_parameters())
    persistent = model.state_dict().keys()
    named |= {name: b for name, b in model.named_buffers() if name in persistent}
    return named


def weight_metadata(tensors: Tensors, dtypes: PublishDtypes) -> list[TensorMeta]:
    """What :func:`export_bucket` can give, in order."""
    shaped = {name: t.base if isinstance(t, LoraWeight) else t for name, t in tensors.items()}
    return [tensor_meta(name, t, dtypes.of(name, t)) for name, t in shaped.items()]


def export_bucket(
    tensors: Tensors, names: tuple[str, ...], index: int, dtypes: PublishDtypes, *, keep: bool
) -> Bucket | None:
    """Gather some tensors on all ranks; pack them where `keep` is set.

    Raises:
        KeyError: For names that the model doesn't have; all of them are listed.
    """
    gathered = gather_tensors(tensors, names, dtypes, keep=keep)
    if keep:
        return pack(index, gathered)
    for _ in gathered:
        pass
    return None


def weight_checksums(tensors: Tensors, dtypes: PublishDtypes, *, keep: bool) -> dict[str, str] | None:
    """SHA-256 of every tensor, gathered one after the other; `None` where `keep` is not set."""
    checksums = tensor_checksums(gather_tensors(tensors, tuple(tensors), dtypes, keep=keep))
    return checksums if keep else None


@torch.no_grad()
def gather_tensors(
    tensors: Tensors, names: tuple[str, ...], dtypes: PublishDtypes, *, keep: bool
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
        tensor = tensor.detach().to(dtypes.of(name, tensor))
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            yield name, full


def unsharded_class(model: nn.Module) -> type[nn.Module]:
    """The model's own class: `fully_shard` puts one of its own before it."""
    return type(model).__mro__[2]
