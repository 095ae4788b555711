"""A lock on a directory that dies with its process."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

LOCK = ".lock"


class RunDirectoryError(RuntimeError):
    """The directory can't be used for this run; the message says why and what to do."""


class RunInUseError(RunDirectoryError):
    """Another live process writes into it."""


_held: set[int] = set()
_fork_hook_set = False


def acquire(path: Path) -> int:
    """Lock the directory for this process; the kernel lets go when the process dies, however it dies.

    Returns:
        A handle for :func:`release`.

    Raises:
        RunInUseError: If a live process holds it; names that process.
    """
    global _fork_hook_set
    lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(lock, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(lock)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise RunInUseError(
                f"{path} is being written by {holder}; wait for it, stop it, or choose another --run-name"
            ) from None
        raise
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    _held.add(lock)
    if not _fork_hook_set:
        os.register_at_fork(after_in_child=_close_in_child)
        _fork_hook_set = True
    return lock


def release(lock: int) -> None:
    """Let go of a lock; a second call does nothing."""
    if lock in _held:
        _held.discard(lock)
        os.close(lock)


def _close_in_child() -> None:
    """A forked child shares the lock and would keep it alive after its parent's death."""
    for lock in _held:
        os.close(lock)
    _held.clear()
