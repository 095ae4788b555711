"""A directory of checkpoints in which each is complete or not there.

    <root>/latest_checkpointed_iteration.txt
    <root>/iter_0000020/

A checkpoint is filled in a temporary directory, flushed to disk, renamed, and only then named by the tracker file.
Older ones go after that, under a temporary name, so that half of one never looks like a checkpoint. Whatever instant
the process dies at, `latest` gives a complete one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRACKER = "latest_checkpointed_iteration.txt"
DRIVER_STATE = "driver.json"
_COMPLETE = re.compile(r"iter_(\d{7,})")
_STAGING_SUFFIX = ".tmp"
# A checkpoint that is being replaced by a newer one of the same iteration.
_REPLACED_SUFFIX = ".replaced"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckpointError(RuntimeError):
    """A checkpoint that can't be written or read; the message says what is still there."""


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        root: Their directory; made when the first one is written.
        keep_last: How many to keep; `None` keeps all.
    """

    def __init__(self, root: Path, keep_last: int | None = 2) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {keep_last}")
        if _COMPLETE.fullmatch(root.name):
            raise CheckpointError(f"{root} is one checkpoint; give its parent directory {root.parent}")
        self.root = root
        self.keep_last = keep_last

    def latest(self) -> Path | None:
        """The checkpoint that the tracker names, or `None` before the first.

        Raises:
            CheckpointError: If the tracker names one that is not there.
        """
        try:
            text = (self.root / TRACKER).read_text().strip()
        except FileNotFoundError:
            return None
        path = self._path(int(text)) if text.isdigit() else None
        if path is not None and not path.exists() and self._replaced(path).is_dir():
            self._replaced(path).rename(path)
        if path is None or not path.is_dir():
            there = ", ".join(p.name for p in self.complete()) or "none"
            raise CheckpointError(f"{self.root / TRACKER} names {text!r}, which is not there; checkpoints: {there}")
        return path

    def complete(self) -> list[Path]:
        """All complete checkpoints, oldest first."""
        if not self.root.is_dir():
            return []
        found = [path for path in self.root.iterdir() if _COMPLETE.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=_iteration)

    @contextlib.contextmanager
    def writing(self, iteration: int) -> Iterator[Path]:
        """`begin`, and `commit` at the end of the block. Whatever fails, the checkpoint before stays the latest.

        Raises:
            CheckpointError: If the disk is full or can't be written, also when a trainer rank ran into it.
        """
        try:
            staging = self.begin(iteration)
            yield staging
        except Exception as error:
            failure = self._failed(iteration, error)
            if failure is None:
                raise
            raise failure from error
        self.commit(iteration)

    def begin(self, iteration: int) -> Path:
        """An empty directory to fill; what earlier, interrupted saves left behind is removed."""
        if not self.root.is_dir():
            self.root.mkdir(parents=True, exist_ok=True)
            _sync_directory(self.root.parent)
        self.latest()  # takes back one whose replacement never came
        for suffix in (_STAGING_SUFFIX, _REPLACED_SUFFIX):
            for stale in self.root.glob(f"iter_*{suffix}"):
                shutil.rmtree(stale)
        staging = self._staging(iteration)
        staging.mkdir()
        return staging

    def commit(self, iteration: int) -> Path:
        """Make the filled directory the latest checkpoint, then remove those beyond `keep_last`.

        Raises:
            CheckpointError: If the disk is full; the checkpoint before is still the latest.
        """
        staging, path = self._staging(iteration), self._path(iteration)
        try:
            _sync_tree(staging)
            if path.exists():  # the same iteration, saved again after a resume
                path.rename(self._replaced(path))
            staging.rename(path)
            _sync_directory(self.root)
            self._point_to(iteration)
        except OSError as error:
            raise self._failed(iteration, error) or error from error
        shutil.rmtree(self._replaced(path), ignore_errors=True)
        if self.keep_last is not None:
            for old in [p for p in self.complete() if p != path][: -(self.keep_last - 1) or None]:
                doomed = old.with_name(old.name + _STAGING_SUFFIX)
                old.rename(doomed)
                shutil.rmtree(doomed)
        return path

    def _failed(self, iteration: int, error: Exception) -> CheckpointError | None:
        """What to tell the user about a save that failed, `None` if the disk has nothing to do with it.

        The half-written files are removed to give room back.
        """
        reason = _disk_problem(error, self.root)
        shutil.rmtree(self._staging(iteration), ignore_errors=True)
        if reason is None:
            return None
        latest = self.latest()
        left = f"{latest.name} is still there and complete" if latest else "there is none before it"
        return CheckpointError(f"checkpoint {iteration} could not be written to {self.root}: {reason}; {left}")

    def write_driver_state(self, directory: Path, state: dict[str, Any]) -> None:
        """Write the driver's state beside the shards, as JSON."""
        (directory / DRIVER_STATE).write_text(json.dumps(state))

    def read_driver_state(self, directory: Path) -> dict[str, Any]:
        """Read what `write_driver_state` wrote.

        Raises:
            CheckpointError: If it isn't there.
        """
        try:
            return json.loads((directory / DRIVER_STATE).read_text())
        except FileNotFoundError:
            raise CheckpointError(f"{directory} is no checkpoint of a run: it has no {DRIVER_STATE}") from None
        except ValueError as error:
            raise CheckpointError(f"{directory / DRIVER_STATE} is damaged: {error}") from error

    def _path(self, iteration: int) -> Path:
        return self.root / f"iter_{iteration:07d}"

    def _staging(self, iteration: int) -> Path:
        return self.root / f"iter_{iteration:07d}{_STAGING_SUFFIX}"

    def _replaced(self, path: Path) -> Path:
        return path.with_name(path.name + _REPLACED_SUFFIX)

    def _point_to(self, iteration: int) -> None:
        temporary = self.root / (TRACKER + _STAGING_SUFFIX)
        with temporary.open("w") as file:
            file.write(str(iteration))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.root / TRACKER)
        _sync_directory(self.root)


def _iteration(path: Path) -> int:
    match = _COMPLETE.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _disk_problem(error: Exception, root: Path) -> str | None:
    """What the disk has to do with a failed write, directly or in another process whose exception came as text."""
    text = str(error)
    try:
        free = f"{shutil.disk_usage(root).free / 2**20:.0f} MiB free"
    except OSError:
        free = "free space unknown"
    if (isinstance(error, OSError) and error.errno in _FULL) or os.strerror(errno.ENOSPC) in text:
        return f"the disk is full ({free})"
    if "inline_container" in text or "PytorchStreamWriter" in text:
        # torch's writer of tensors is native code and loses the reason.
        return f"the disk did not take all of the data ({free}): it is full or broken"
    return text if isinstance(error, OSError) else None


def _sync_tree(directory: Path) -> None:
    """Flush every file and directory below to disk."""
    for folder, _, files in os.walk(directory):
        for name in files:
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        _sync_directory(Path(folder))


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
