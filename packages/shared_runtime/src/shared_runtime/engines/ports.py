"""Ports for server processes, reserved so that no two servers of this machine are given the same one."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from pathlib import Path

_RANGE = range(20_000, 32_000)  # below the ports that the kernel gives to outgoing connections


class PortReservation:
    """Free TCP ports of this machine, held until `release` or the end of this process.

    A server binds its port long after it was chosen, so that a look at what is free would give two servers that start
    side by side the same one. Each port has a file here that its holder keeps locked. Between processes of one user
    that is enough; the check that nobody listens keeps others' servers apart.

    Args:
        count: How many.

    Raises:
        RuntimeError: None are left.
    """

    def __init__(self, count: int) -> None:
        self._locks: list[int] = []
        self.ports: list[int] = []
        directory = Path(tempfile.gettempdir()) / f"tandem-ports-{os.getuid()}"
        directory.mkdir(exist_ok=True)
        for port in random.sample(_RANGE, len(_RANGE)):
            if len(self.ports) == count:
                return
            lock = os.open(directory / str(port), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            if _lock(lock) and _is_free(port):
                self._locks.append(lock)
                self.ports.append(port)
            else:
                os.close(lock)
        self.release()
        raise RuntimeError(f"this machine has no {count} free ports from {_RANGE.start} to {_RANGE.stop - 1}")

    def release(self) -> None:
        """Give the ports back."""
        for lock in self._locks:
            os.close(lock)
        self._locks, self.ports = [], []


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
