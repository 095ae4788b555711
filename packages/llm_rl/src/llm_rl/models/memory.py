"""How much memory a run will need, told before it starts from the headers of the checkpoint's files."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

PROCESS_BYTES = 600 * 1024**2
"""A worker process with torch and transformers imported, without any model."""

BYTES = {"fp32": 4, "bf16": 2}


def count_parameters(directory: Path) -> int | None:
    """Number of stored parameters, from the safetensors headers alone; `None` without such files."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        return None
    return sum(math.prod(entry["shape"]) for file in files for entry in _header(file).values())


def _header(file: Path) -> dict[str, dict]:
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return header


def run_bytes(
    parameters: int,
    *,
    train_dtype: str,
    rollout_dtype: str,
    num_engines: int,
    num_trainers: int,
    with_reference: bool,
    with_critic: bool = False,
    with_adapters: bool = False,
    adam: bool = True,
) -> int:
    """Lower bound of what trainer and engines hold together, activations and caches left out.

    The trainer holds fp32 master weights, gradients and, with Adam, two moments; a bf16 trainer gathers a bf16 copy
    as well. A critic of the same size is trained likewise. The shards of all ranks add up to one model. Of a model
    with adapters only these have gradients and moments, which count as nothing here.
    """
    per_parameter = 0
    if num_trainers:
        held = 4 + (2 if train_dtype == "bf16" else 0)
        trained = held + 4 + (8 if adam else 0)
        policy = held if with_adapters else trained
        per_parameter = policy + (trained if with_critic else 0) + (4 if with_reference else 0)
    engines = BYTES[rollout_dtype] * num_engines
    return parameters * (per_parameter + engines) + PROCESS_BYTES * (num_trainers + num_engines)
