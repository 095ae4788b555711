"""The engine's side of an update session: named tensors that are overwritten in place.

Both domains' local engines hold one of these and pass the weight verbs on to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from shared_runtime.engines.contract import UpdateReport
from shared_runtime.weight_sync.bucket import Bucket, TensorMeta, tensor_meta, unpack
from shared_runtime.weight_sync.checksum import list_names, tensor_sha256


class WeightUpdateError(RuntimeError):
    """A weight update that does not fit the engine, or an engine whose last update failed."""


class TensorReceiver:
    """Receives updates into tensors that stay where they are.

    Args:
        named_tensors: Gives the tensors by published name. A tied tensor stands under each of its names; an update
            brings it once, under any of them. Called at the start of each update, so the tensors may move in between.
        version: Version of the weights that are there from the start.
    """

    def __init__(self, named_tensors: Callable[[], Mapping[str, torch.Tensor]], version: int = 0) -> None:
        self._named_tensors = named_tensors
        self.version = version
        self._names = _first_names(named_tensors())
        self._update: _Update | None = None
        self._failure: str | None = None

    def check_usable(self) -> None:
        """Raise unless the tensors are those of one complete version.

        Raises:
            WeightUpdateError: An update is open, or the last one failed.
        """
        if self._update is not None:
            raise WeightUpdateError(f"the update to weight version {self._update.version} is still open")
        if self._failure is not None:
            raise WeightUpdateError(f"{self._failure}; publish the weights again before generating")

    def begin(self, version: int, metas: list[TensorMeta]) -> None:
        """Open an update, after checking names, shapes and dtypes; every problem is reported at once.

        Raises:
            WeightUpdateError: An update is open already, or the announced tensors are not exactly those that are here.
        """
        if self._update is not None:
            raise WeightUpdateError(f"the update to weight version {self._update.version} is still open")
        tensors = dict(self._named_tensors())
        problems = _mismatches(metas, tensors)
        if problems:
            raise WeightUpdateError(
                f"weight version {version} does not fit this engine's model, nothing was changed: {'; '.join(problems)}"
            )
        self._update = _Update(version, {meta.name: meta for meta in metas}, tensors)

    def apply(self, bucket: Bucket) -> int:
        """Copy one bucket into place.

        Returns:
            How many tensors were written.

        Raises:
            WeightUpdateError: No update is open, or the bucket brings a tensor that was not announced like this or
                that has arrived before.
            ValueError: The bucket's bytes are corrupt.
        """
        update = self._open_update()
        for meta in bucket.tensors:
            if update.announced.get(meta.name) != meta:
                raise WeightUpdateError(
                    f"bucket {bucket.index} brings {meta}, announced: {update.announced.get(meta.name)}"
                )
            if meta.name in update.arrived:
                raise WeightUpdateError(f"bucket {bucket.index} brings {meta.name} a second time")
        with torch.no_grad():
            for meta, value in unpack(bucket):
                update.tensors[meta.name].copy_(value)
                update.arrived.add(meta.name)
        return len(bucket.tensors)

    def end(self) -> UpdateReport:
        """Close the update; its version counts from here on.

        Raises:
            WeightUpdateError: No update is open, or announced tensors have not arrived (the update stays open).
        """
        update = self._open_update()
        if missing := update.announced.keys() - update.arrived:
            raise WeightUpdateError(f"weight version {update.version} is incomplete, missing: {list_names(missing)}")
        self.version, self._names = update.version, tuple(update.announced)
        self._update = self._failure = None
        num_bytes = sum(meta.nbytes for meta in update.announced.values())
        return UpdateReport(version=update.version, num_tensors=len(update.announced), num_bytes=num_bytes)

    def abort(self) -> None:
        """Close a failed update: the tensors are unusable until one succeeds, even if this one had not begun."""
        if self._update is not None:
            self._failure = f"the update to weight version {self._update.version} failed"
        elif self._failure is None:
            self._failure = f"a weight update of this engine (at version {self.version}) failed"
        self._update = None

    def checksums(self) -> dict[str, str]:
        """SHA-256 of every tensor, by the names of the last update."""
        tensors = self._named_tensors()
        return {name: tensor_sha256(tensors[name]) for name in self._names}

    def _open_update(self) -> _Update:
        if self._update is None:
            raise WeightUpdateError("no weight update is open")
        return self._update


class _Update:
    """What an open update has announced and received."""

    def __init__(self, version: int, announced: dict[str, TensorMeta], tensors: dict[str, torch.Tensor]) -> None:
        self.version = version
        self.announced = announced
        self.tensors = tensors
        self.arrived: set[str] = set()


def _identity(tensor: torch.Tensor) -> object:
    """Equal for tensors that are the same memory. An empty tensor has none, so it is itself only."""
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else id(tensor)


def _first_names(tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """One name for every distinct tensor: the first that it has."""
    first: dict[object, str] = {}
    for name, tensor in tensors.items():
        first.setdefault(_identity(tensor), name)
    return tuple(first.values())


def _mismatches(metas: list[TensorMeta], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """What keeps the announced tensors from being exactly the held ones, in words."""
    held = {name: tensor_meta(name, tensor) for name, tensor in tensors.items()}
    known = [meta for meta in metas if meta.name in held]
    sources: dict[object, list[str]] = {}
    for meta in known:
        sources.setdefault(_identity(tensors[meta.name]), []).append(meta.name)
    found = {
        "unknown to the engine": [meta.name for meta in metas if meta.name not in held],
        "missing from the update": [name for name in _first_names(tensors) if _identity(tensors[name]) not in sources],
        "shapes differ": [
            f"{meta.name} {list(meta.shape)} (the engine's is {list(held[meta.name].shape)})"
            for meta in known
            if meta.shape != held[meta.name].shape
        ],
        "dtypes differ": [
            f"{meta.name} {meta.dtype} (the engine's is {held[meta.name].dtype})"
            for meta in known
            if meta.dtype != held[meta.name].dtype
        ],
        "one tied tensor in the engine, publish it once": [
            " = ".join(names) for names in sources.values() if len(names) > 1
        ],
    }
    return [f"{problem}: {list_names(names)}" for problem, names in found.items() if names]
