"""Operating-system facts about processes: who is left, what was written last, and dying with the parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies. For `subprocess.Popen(preexec_fn=...)`.

    Args:
        parent_pid: The expected parent, taken before the fork: if it died in between, this process ends at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def end_processes(processes: Sequence[psutil.Process], patience_s: float) -> None:
    """Wait for processes to end, kill those that have not after `patience_s`, and wait for these."""
    _, alive = psutil.wait_procs(processes, timeout=patience_s)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def oom_kills() -> int:
    """How many processes the kernel's out-of-memory killer has ended on this machine since boot (0 if unknown)."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def last_lines(path: Path, count: int = 20, limit: int = 16_384) -> list[str]:
    """The last lines of a text file that may be large; empty if it can't be read. Progress bars that moved on go."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            lines = file.read().decode(errors="replace").rstrip("\r\n").split("\n")
    except OSError:
        return []
    shown = [line.rsplit("\r", 1)[-1].rstrip() for line in lines]
    return [line for line in shown if line][-count:]


@contextlib.contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Have SIGTERM unwind the main thread like Ctrl-C, so that `with` blocks clean up, and leave with status 143."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = False

    def handler(signum: int, frame: object) -> None:
        nonlocal received
        received = True
        # Not SystemExit at once: inside of a call of Ray it would lose its status.
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if received:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
