"""Tensors on their way to an engine: metadata, and size-bounded flat buckets of bytes.

A bucket is data only (a numpy byte array and names), so it can cross a process border through shared memory
without any pickle of code, and it holds dtypes that numpy lacks (bfloat16).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
