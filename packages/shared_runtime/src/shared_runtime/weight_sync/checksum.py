"""Checksums of weights: a fast one for bytes in transit, a strong one for tensors at rest."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

MAX_NAMES = 20


def crc32(data: np.ndarray) -> int:
    """CRC-32 of a contiguous byte array."""
    return zlib.crc32(data.data)


def tensor_sha256(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes in row-major order, on any device and of any dtype.

    Equal digests mean bit-identical values: `0.0` and `-0.0` differ.
    """
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(flat.numpy().data).hexdigest()


def tensor_checksums(tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """:func:`tensor_sha256` of every named tensor."""
    items = tensors.items() if isinstance(tensors, Mapping) else tensors
    return {name: tensor_sha256(tensor) for name, tensor in items}


def list_names(names: Iterable[str]) -> str:
    """Names for a message: sorted, at most 20 of them, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - MAX_NAMES} more" if len(ordered) > MAX_NAMES else ""
    return ", ".join(ordered[:MAX_NAMES]) + more


def compare_checksums(published: Mapping[str, str], held: Mapping[str, str], engine: str) -> None:
    """Check that an engine holds exactly the published tensors.

    Args:
        published: Digests of the trainer's tensors, by name.
        held: Digests of the engine's tensors, by the same names.
        engine: What to call the engine in the message.

    Raises:
        ValueError: The names differ or a tensor does; the message lists them.
    """
    problems = []
    if only := published.keys() - held.keys():
        problems.append(f"not in the engine: {list_names(only)}")
    if only := held.keys() - published.keys():
        problems.append(f"only in the engine: {list_names(only)}")
    if different := {name for name in published.keys() & held.keys() if published[name] != held[name]}:
        problems.append(f"different bytes: {list_names(different)}")
    if problems:
        raise ValueError(f"the weights of {engine} are not those of the trainer: {'; '.join(problems)}")
