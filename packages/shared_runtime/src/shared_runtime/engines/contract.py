"""What a rollout engine has to do: the worker side, and the client side that rollout code calls.

A worker is synchronous and handles a batch; it lives in a Ray actor or in the driver's own process. A client is
asynchronous and handles one request, so that custom generate functions, multi-turn loops and HTTP servers look the
same to the code above.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from shared_runtime.weight_sync.bucket import Bucket, TensorMeta


@dataclass(frozen=True)
class UpdateReport:
    """What an engine says after a weight update."""

    version: int
    num_tensors: int
    num_bytes: int


class WeightReceiver(Protocol):
    """The weight-session verbs, in the order in which a session calls them."""

    def pause(self) -> None:
        """Stop taking new requests; return when none is running."""

    def flush_cache(self) -> None:
        """Forget every cached prefix: it belongs to the old weights."""

    def begin_update(self, version: int, tensors: list[TensorMeta]) -> None:
        """Open an update. Names or shapes that the engine does not know are an error that lists them."""

    def apply_bucket(self, bucket: Bucket) -> int:
        """Load one bucket; return the number of tensors applied."""

    def end_update(self) -> UpdateReport:
        """Close the update: every announced tensor must have arrived. From here on the version counts."""

    def abort_update(self) -> None:
        """Close a failed update. The engine refuses to generate until an update succeeds."""

    def resume(self) -> None:
        """Take requests again."""

    def weight_checksums(self) -> dict[str, str]:
        """SHA-256 of every tensor as it stands in the engine, by published name."""


class EngineWorker(WeightReceiver, Protocol):
    """One engine process."""

    def generate(self, requests: list[Any]) -> list[Any]:
        """Answer a batch of requests, in order."""

    def health(self) -> dict[str, Any]:
        """A small dict of facts; raises when the engine can't serve."""

    def sleep(self) -> None:
        """Free the device memory."""

    def wake_up(self) -> None:
        """Take it back."""


class EngineClient(Protocol):
    """What rollout code calls: one request in, one output back."""

    async def generate(self, request: Any) -> Any:
        """Generate for one request. Concurrent calls are batched."""
