"""Tensors on their way to an engine: metadata, and size-bounded flat buckets of bytes.

A bucket is data only (a numpy byte array and names), so it can cross a process border through shared memory
without any pickle of code, and it holds dtypes that numpy lacks (bfloat16).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shared_runtime.weight_sync.checksum import crc32, list_names

if TYPE_CHECKING:
    import torch

ALIGNMENT = 16
"""Every tensor starts at a multiple of this, so that its bytes can be viewed as any dtype."""


@dataclass(frozen=True)
class TensorMeta:
    """One published tensor: Hugging Face (or diffusers) name, full shape, dtype name such as `bfloat16`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Bucket:
    """Some tensors, packed one behind the other.

    Attributes:
        index: Position in the update's plan.
        tensors: What the bytes hold, in order, each starting at a multiple of 16 bytes.
        data: Flat `uint8` array.
        checksum: CRC-32 of `data`; the receiver refuses a bucket whose bytes differ.
    """

    index: int
    tensors: tuple[TensorMeta, ...]
    data: np.ndarray
    checksum: int


def tensor_meta(name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorMeta:
    """Describe a tensor, as it is or as it will be when published in `dtype`."""
    dtype = dtype or tensor.dtype
    nbytes = tensor.numel() * dtype.itemsize
    return TensorMeta(name, tuple(tensor.shape), str(dtype).removeprefix("torch."), nbytes)


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up to the next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def plan_buckets(
    tensors: Sequence[TensorMeta], max_bytes: int, atomic_groups: Sequence[Sequence[str]] = ()
) -> list[tuple[str, ...]]:
    """Split tensors over buckets of at most `max_bytes`, in their order.

    A unit (one tensor, or one atomic group) is never split: one larger than the limit gets a bucket of its own. An
    atomic group stands where its first member does.

    Args:
        tensors: Every tensor of the update.
        max_bytes: Limit of one bucket, alignment included.
        atomic_groups: Names that must arrive together (a LoRA pair, the parts of a fused projection).

    Returns:
        The names of each bucket; every tensor is in exactly one.

    Raises:
        ValueError: The limit is not positive, a name is there twice, a group names an unknown tensor, or two groups
            share one.
    """
    if max_bytes <= 0:
        raise ValueError(f"--update-weight-buffer-size must be positive, got {max_bytes}")
    sizes = {meta.name: aligned(meta.nbytes) for meta in tensors}
    if len(sizes) != len(tensors):
        names = [meta.name for meta in tensors]
        raise ValueError(f"tensors published twice: {list_names({name for name in names if names.count(name) > 1})}")
    group_of: dict[str, tuple[str, ...]] = {}
    for group in atomic_groups:
        for name in group:
            if name not in sizes:
                raise ValueError(f"atomic group {tuple(group)} names {name!r}, which is not published")
            if name in group_of:
                raise ValueError(f"{name!r} is in two atomic groups: {group_of[name]} and {tuple(group)}")
            group_of[name] = tuple(group)

    buckets: list[tuple[str, ...]] = []
    current: list[str] = []
    filled = 0
    placed: set[str] = set()
    for meta in tensors:
        if meta.name in placed:
            continue
        unit = group_of.get(meta.name, (meta.name,))
        size = sum(sizes[name] for name in unit)
        if current and filled + size > max_bytes:
            buckets.append(tuple(current))
            current, filled = [], 0
        current.extend(unit)
        placed.update(unit)
        filled += size
    if current:
        buckets.append(tuple(current))
    return buckets


def pack(index: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Bucket:
    """Copy tensors, from any device, into one bucket of fresh memory (so their own buffers may be reused at once)."""
    import torch

    named = list(tensors)
    metas = tuple(tensor_meta(name, tensor) for name, tensor in named)
    data = np.zeros(sum(aligned(meta.nbytes) for meta in metas), dtype=np.uint8)
    target = torch.from_numpy(data)
    offset = 0
    for meta, (_, tensor) in zip(metas, named, strict=True):
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        target[offset : offset + meta.nbytes].copy_(flat)
        offset += aligned(meta.nbytes)
    return Bucket(index=index, tensors=metas, data=data, checksum=crc32(data))


def unpack(bucket: Bucket) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
    """The tensors of a bucket, as CPU views of its bytes: copy from them, never write to them.

    Everything is checked before the first tensor is handed out.

    Raises:
        ValueError: The checksum, the total size or a tensor's size does not fit.
    """
    import torch

    if (found := crc32(bucket.data)) != bucket.checksum:
        raise ValueError(
            f"weight bucket {bucket.index} is corrupt: its checksum is {found:#010x}, expected {bucket.checksum:#010x}"
        )
    dtypes = [getattr(torch, meta.dtype) for meta in bucket.tensors]
    for meta, dtype in zip(bucket.tensors, dtypes, strict=True):
        if math.prod(meta.shape) * dtype.itemsize != meta.nbytes:
            raise ValueError(f"weight bucket {bucket.index}: {meta} does not describe {meta.nbytes} bytes")
    expected = sum(aligned(meta.nbytes) for meta in bucket.tensors)
    if bucket.data.nbytes != expected:
        raise ValueError(f"weight bucket {bucket.index} has {bucket.data.nbytes} bytes, its tensors need {expected}")

    with warnings.catch_warnings():
        # What comes out of Ray's object store is read-only, which is all that is needed here.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        flat = torch.from_numpy(bucket.data)
    offset = 0
    for meta, dtype in zip(bucket.tensors, dtypes, strict=True):
        yield meta, flat[offset : offset + meta.nbytes].view(dtype).view(meta.shape)
        offset += aligned(meta.nbytes)
