"""What every engine that runs its model in its own process does alike: pausing, sleeping and receiving weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from shared_runtime.engines.contract import UpdateReport
from shared_runtime.weight_sync.bucket import Bucket, TensorMeta
from shared_runtime.weight_sync.receiver import TensorReceiver


class InProcessEngine:
    """Base of the domains' local engines; an :class:`~shared_runtime.engines.contract.EngineWorker` without `generate`.

    A subclass says which tensors an update overwrites and how they move, calls :meth:`_start_receiving` at the end of
    its constructor, and answers requests inside :meth:`_serving`.
    """

    device: torch.device

    def named_tensors(self) -> Mapping[str, torch.Tensor]:
        """What an update overwrites, by published name."""
        raise NotImplementedError

    def _move(self, device: torch.device) -> None:
        """Bring the model to a device."""
        raise NotImplementedError

    def _start_receiving(self, weight_version: int) -> None:
        self._receiver = TensorReceiver(self.named_tensors, weight_version)
        self._paused = self._asleep = False
        self._generating = threading.Lock()

    @contextmanager
    def _serving(self) -> Iterator[None]:
        """Hold while requests are answered.

        Raises:
            RuntimeError: The engine is paused or asleep.
            WeightUpdateError: Its weights are those of an unfinished or failed update.
        """
        with self._generating:
            if self._paused or self._asleep:
                raise RuntimeError(f"the engine is {'paused' if self._paused else 'asleep'} and takes no requests")
            self._receiver.check_usable()
            yield

    @property
    def weight_version(self) -> int:
        """Version of the weights that generate now."""
        return self._receiver.version

    def pause(self) -> None:
        """Stop taking new requests; return when none is running."""
        self._paused = True
        with self._generating:
            pass

    def resume(self) -> None:
        """Take requests again."""
        self._paused = False

    def flush_cache(self) -> None:
        """Nothing to forget: nothing that depends on the weights outlives its batch."""

    def begin_update(self, version: int, tensors: list[TensorMeta]) -> None:
        """Open an update. Names, shapes or dtypes that are not the model's are an error that lists them."""
        self._receiver.begin(version, tensors)

    def apply_bucket(self, bucket: Bucket) -> int:
        """Copy one bucket into the parameters; return the number of tensors applied."""
        return self._receiver.apply(bucket)

    def end_update(self) -> UpdateReport:
        """Close the update: every announced tensor must have arrived. From here on the version counts."""
        return self._receiver.end()

    def abort_update(self) -> None:
        """Close a failed update. The engine refuses to generate until an update succeeds."""
        self._receiver.abort()

    def weight_checksums(self) -> dict[str, str]:
        """SHA-256 of every tensor, by published name."""
        return self._receiver.checksums()

    def sleep(self) -> None:
        """Move the weights off the device (nothing moves on the CPU)."""
        self._asleep = True
        self._move(torch.device("cpu"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake_up(self) -> None:
        """Move them back."""
        self._move(self.device)
        self._asleep = False
