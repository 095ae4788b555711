"""Weights on their way out: published bucket by bucket to engines, or written as a Hugging Face directory."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shared_runtime.weight_sync.bucket import Bucket, TensorMeta, pack, tensor_meta
from shared_runtime.weight_sync.checksum import tensor_checksums

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Files of a tokenizer or processor, which belong to an exported directory but aren't written by the model.
_COMPANIONS = ("token", "vocab", "merges", "special_", "added_", "chat_template", "preprocessor", "processor", "spiece")


def published_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Trained tensors under their Hugging Face names, tied ones once; persistent buffers too."""
    named: dict[str, Tensor] = dict(model.named_parameters())
    persistent = model.state_dict().keys()
    named |= {name: b for name, b in model.named_buffers() if name in persistent}
    return named


def weight_metadata(model: nn.Module, dtype: torch.dtype) -> list[TensorMeta]:
    """What :func:`export_bucket` can give, in the model's order."""
    return [tensor_meta(name, t, _published_dtype(t, dtype)) for name, t in published_tensors(model).items()]


def export_bucket(
    model: nn.Module, names: tuple[str, ...], index: int, dtype: torch.dtype, *, keep: bool
) -> Bucket | None:
    """Gather some tensors on all ranks; pack them where `keep` is set.

    Raises:
        KeyError: For names that the model doesn't have; all of them are listed.
    """
    gathered = gather_tensors(model, names, dtype, keep=keep)
    if keep:
        return pack(index, gathered)
    for _ in gathered:
        pass
    return None


def weight_checksums(model: nn.Module, dtype: torch.dtype, *, keep: bool) -> dict[str, str] | None:
    """SHA-256 of every published tensor, gathered one after the other; `None` where `keep` is not set."""
    checksums = tensor_checksums(gather_tensors(model, tuple(published_tensors(model)), dtype, keep=keep))
    return checksums if keep else None


@torch.no_grad()
def gather_tensors(
    model: nn.Module, names: tuple[str, ...], dtype: torch.dtype, *, keep: bool
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors one after the other, on every rank; nothing is yielded where `keep` is not set.

    Raises:
        KeyError: For names that the model doesn't have; all of them are listed.
    """
    tensors = published_tensors(model)
    unknown = [name for name in names if name not in tensors]
    if unknown:
        raise KeyError(f"the model has no tensors named {', '.join(unknown)}")
    for name in names:
        tensor = tensors[name]
        # Casting the shard first halves what travels for bf16.
        tensor = tensor.detach().to(_published_dtype(tensor, dtype))
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if keep:
            yield name, full


def save_hf(model: PreTrainedModel, source: Path, directory: Path, dtype: torch.dtype, *, keep: bool) -> None:
    """Write config, weights and tokenizer as an ordinary Hugging Face directory; rank 0 (`keep`) writes."""
    names = tuple(published_tensors(model))
    state = {name: t.cpu().clone() for name, t in gather_tensors(model, names, dtype, keep=keep)}
    if not keep:
        return
    directory.mkdir(parents=True, exist_ok=True)
    _plain_copy(model, dtype).save_pretrained(directory, state_dict=state)
    for file in source.iterdir():
        if file.is_file() and file.name.startswith(_COMPANIONS):
            shutil.copy2(file, directory / file.name)


def _plain_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The same architecture without weights and without sharding, for `save_pretrained`."""
    config = copy.deepcopy(model.config)
    with torch.device("meta"):
        plain: Any = _unsharded_class(model)(config)
    plain = plain.to(dtype)
    plain.generation_config = copy.deepcopy(model.generation_config)
    return plain


def _unsharded_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """`fully_shard` puts a class of its own before the model's."""
    return type(model).__mro__[2]


def _published_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype
