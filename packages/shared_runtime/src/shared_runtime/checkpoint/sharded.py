"""Sharded save and load with PyTorch's Distributed Checkpoint, at any number of ranks.

The shards hold tensors only; the index that DCP writes beside them (`.metadata`) is a pickle, so load only
checkpoints whose writer you trust.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

SHARDS = "shards"


class ShardError(RuntimeError):
    """Ranks that could not write or read their part; the message says which and why."""


def save_sharded(state: dict[str, Any], directory: Path) -> None:
    """Write a nested dict of tensors (DTensors by shard, others once). Every rank of the process group must call.

    Args:
        state: What to save; loading asks for the same keys.
        directory: An existing directory, the same on all ranks.

    Raises:
        ShardError: If any rank could not write, on every rank.
    """
    with _quiet(), _named_failures(f"could not be written to {directory}"):
        dcp.save(state, checkpoint_id=directory / SHARDS, no_dist=not dist.is_initialized())


def load_sharded(state: dict[str, Any], directory: Path) -> None:
    """Fill the tensors of `state` in place from what `save_sharded` wrote, at any number of ranks.

    Raises:
        FileNotFoundError: If the directory holds no sharded checkpoint.
        ShardError: If a key is missing or has another shape.
    """
    shards = directory / SHARDS
    if not (shards / ".metadata").is_file():
        raise FileNotFoundError(f"{directory} holds no sharded checkpoint: {shards / '.metadata'} is missing")
    with _quiet(), _named_failures(f"could not be read from {directory}"):
        dcp.load(state, checkpoint_id=shards, no_dist=not dist.is_initialized())


@contextlib.contextmanager
def _named_failures(what: str) -> Iterator[None]:
    """DCP's own exception is not an `Exception`, so it would end a worker that no handler expects to end."""
    try:
        yield
    except CheckpointException as error:
        reasons = {rank: f"{type(failure).__name__}: {failure}" for rank, (failure, _) in error.failures.items()}
        raise ShardError(f"shards {what}: " + "; ".join(f"rank {r}: {why}" for r, why in reasons.items())) from error


class _quiet(warnings.catch_warnings):
    """DCP warns of a single process and of its own deprecated internals; neither is the user's concern."""

    def __enter__(self) -> Any:
        caught = super().__enter__()
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.distributed.checkpoint")
        warnings.filterwarnings("ignore", category=FutureWarning)
        return caught
