"""How much memory a run will need, told before it starts from the headers of the checkpoint's files.

All numbers are lower bounds: activations and caches are left out. The shards of all ranks add up to one model.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

PROCESS_BYTES = 600 * 1024**2
"""A worker process with torch and its model library imported, without any model."""

BYTES = {"fp32": 4, "bf16": 2}


def count_parameters(directory: Path) -> int | None:
    """Parameters in a directory's safetensors files, from their headers; `None` without such files.

    Further files of the same weights in half precision (`model.fp16.safetensors`) are left out.
    """
    files = sorted(file for file in directory.glob("*.safetensors") if ".fp16" not in file.name)
    if not files:
        return None
    return sum(math.prod(entry["shape"]) for file in files for entry in _header(file).values())


def _header(file: Path) -> dict[str, dict]:
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    return header


def trained_bytes(
    parameters: int, *, master_dtype: str = "fp32", compute_dtype: str, adam: bool = True, frozen: bool = False
) -> int:
    """What a trainer holds of a model: weights, gradients, moments, and a gathered copy in another dtype.

    Args:
        parameters: How many.
        master_dtype: Of sharded weights, gradients and moments, `fp32` or `bf16`.
        compute_dtype: Of forward and backward.
        adam: Two moments a parameter; otherwise none.
        frozen: Of a model with adapters only these have gradients and moments, which count as nothing here.
    """
    master = BYTES[master_dtype]
    held = master + (BYTES[compute_dtype] if compute_dtype != master_dtype else 0)
    return parameters * (held if frozen else held + master + (2 * master if adam else 0))


def memory_problem(directory: Path, parameters: int, needed: int, hint: str) -> str | None:
    """Why a model can't fit into what is free of this machine's memory, or `None` if it may.

    Args:
        directory: Of the model, for the message.
        parameters: How many it has.
        needed: Bytes, over all processes.
        hint: What to do about it.
    """
    import psutil

    available = psutil.virtual_memory().available
    if needed <= available:
        return None
    return (
        f"--hf-checkpoint {directory} has {parameters / 1e6:.0f} M parameters: training and serving it needs at least "
        f"{needed / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB are free. {hint}"
    )
