"""Run a Python program that nobody has read: in a process of its own, with limits, without network or children."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from rewards.request import RewardError

logger = logging.getLogger(__name__)

_CHILD = Path(__file__).with_name("sandbox_child.py")
_DISK_CHECK_S = 0.1


@dataclass(frozen=True, slots=True)
class Limits:
    """What a program may use.

    Attributes:
        timeout_s: Seconds of wall time; processor time is limited to the same, rounded up.
        memory_mb: Address space in MiB, the interpreter's own (about 100) included.
        output_kb: KiB that it may write, to standard output or to any one file.
        disk_mb: MiB that all its files may have together; looked at ten times a second.
    """

    timeout_s: float = 5.0
    memory_mb: int = 1024
    output_kb: int = 1024
    disk_mb: int = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended: `passed` if it and its tests ran through, what it printed, and whether time was over."""

    passed: bool
    stdout: str
    timed_out: bool


def run_program(source: str, *, stdin: str = "", tests: str | None = None, limits: Limits | None = None) -> Outcome:
    """Run a program, and tests after it in the same namespace.

    The process has no network (seccomp refuses every socket), can start no other process (threads are fine), signals
    and re-schedules none, and leaves no shared memory or queues; a superuser's rights are dropped. It sees an empty
    environment, and an empty working directory that is removed afterwards: it changes files only there, and besides
    reads and lists only Python's files and the system's libraries (Landlock; on kernels without it a warning is logged
    once). Its process group is killed at the end.

    Args:
        source: Python source.
        stdin: What it reads.
        tests: Python source that raises where the program is wrong.
        limits: Time, memory and output.

    Raises:
        RewardError: The sandbox could not be set up. The program has then not been run.
    """
    limits = limits or Limits()
    secret = secrets.token_hex(16)
    request = {
        "source": source,
        "tests": tests,
        "stdin": stdin,
        "secret": secret,
        "limits": {
            "cpu_s": int(limits.timeout_s) + 1,
            "memory_bytes": limits.memory_mb << 20,
            "output_bytes": limits.output_kb << 10,
        },
    }
    with tempfile.TemporaryDirectory(prefix="rewards-code-", ignore_cleanup_errors=True) as directory:
        output = Path(directory, "stdout")
        with output.open("wb") as stdout:
            process = subprocess.Popen(
                [sys.executable, "-I", str(_CHILD)],
                stdin=subprocess.PIPE,
                stdout=stdout,
                stderr=subprocess.DEVNULL,
                cwd=directory,
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
                start_new_session=True,
            )
        try:
            timed_out = _wait(process, json.dumps(request).encode() + b"\n", directory, limits)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        report = _read(Path(directory, "report"), 200)
        if report.startswith("no sandbox"):
            raise RewardError(
                f"the code reward cannot lock its process down here ({report}): it needs Linux with seccomp"
            )
        if report.startswith("files open"):
            _warn_without_landlock()
        return Outcome(report.endswith(secret), _read(output, limits.output_kb << 10), timed_out)


def _wait(process: subprocess.Popen[bytes], stdin: bytes | None, directory: str, limits: Limits) -> bool:
    """Wait until the process ends (`False`), its time is over (`True`) or its files are too many (`False`)."""
    deadline = time.monotonic() + limits.timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            process.communicate(stdin, timeout=min(_DISK_CHECK_S, max(left, 0.0)))
            return False
        except subprocess.TimeoutExpired:
            stdin = None  # `communicate` goes on with what it was given
        if left <= _DISK_CHECK_S:
            return True
        if _disk_bytes(directory) > limits.disk_mb << 20:
            return False


def _disk_bytes(directory: str) -> int:
    """What the files of a directory take on disk, at least 4 KiB each; the sandbox lets it have no subdirectories."""
    with os.scandir(directory) as entries:
        return sum(4096 + _blocks(entry) * 512 for entry in entries)


def _blocks(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks
    except FileNotFoundError:  # removed since
        return 0


def _read(path: Path, limit: int) -> str:
    """The first bytes of a file that the program may have replaced by anything."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    with os.fdopen(descriptor, "rb") as file, contextlib.suppress(OSError):
        return file.read(limit).decode(errors="replace")
    return ""


@lru_cache(maxsize=1)
def _warn_without_landlock() -> None:
    logger.warning("this kernel has no Landlock: programs under test can read and change files of this user")
