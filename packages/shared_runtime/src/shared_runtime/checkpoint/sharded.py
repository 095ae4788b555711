"""Sharded save and load with PyTorch's Distributed Checkpoint, at any number of ranks.

The shards hold tensors only; the index that DCP writes beside them (`.metadata`) is a pickle, so load only
checkpoints whose writer you trust.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

SHARDS = "shards"


def save_sharded(state: dict[str, Any], directory: Path) -> None:
    """Write a nested dict of tensors (DTensors by shard, others once). Every rank of the process group must call.

    Args:
        state: What to save; loading asks for the same keys.
        directory: An existing directory, the same on all ranks.

    Raises:
        CheckpointException: If any rank could not write, on every rank.
    """
    with _quiet():
        dcp.save(state, checkpoint_id=directory / SHARDS, no_dist=not dist.is_initialized())


def load_sharded(state: dict[str, Any], directory: Path) -> None:
    """Fill the tensors of `state` in place from what `save_sharded` wrote, at any number of ranks.

    Raises:
        FileNotFoundError: If the directory holds no sharded checkpoint.
        CheckpointException: If a key is missing or has another shape.
    """
    shards = directory / SHARDS
    if not (shards / ".metadata").is_file():
        raise FileNotFoundError(f"{directory} holds no sharded checkpoint: {shards / '.metadata'} is missing")
    with _quiet():
        dcp.load(state, checkpoint_id=shards, no_dist=not dist.is_initialized())


class _quiet(warnings.catch_warnings):
    """DCP warns of a single process and of its own deprecated internals; neither is the user's concern."""

    def __enter__(self) -> Any:
        caught = super().__enter__()
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
        warnings.filterwarnings("ignore", category=FutureWarning)
        return caught
