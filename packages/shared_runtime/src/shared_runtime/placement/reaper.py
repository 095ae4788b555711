"""A small process that ends what a driver leaves, however the driver ends. Run as a script, standard library only.

Everything that belongs to a local cluster, down to the children of workers, has inherited one environment variable.
When the driver closes the pipe, or is gone, the reaper kills all these processes, and removes the directory.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

MARKER = "TANDEM_RAY_DIR"


def start(directory: Path) -> subprocess.Popen[bytes]:
    """Start the reaper of a directory. Close its `stdin` and wait for it to have everything ended."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(directory), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Ctrl-C and a closed terminal go to the driver's group.
        start_new_session=True,
    )


def marked(directory: str) -> list[int]:
    """Processes that belong to the directory: it is in their environment, or they have a file in it open.

    The second is for processes that have renamed themselves, which may write over their environment.
    """
    wanted = f"{MARKER}={directory}".encode()
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        # Processes of other users can't be read, and are not ours.
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0") or _has_open(entry, directory):
                found.append(int(entry))
    # The driver itself may have a log open.
    return [pid for pid in found if pid not in (os.getpid(), os.getppid())]


def _has_open(entry: str, directory: str) -> bool:
    folder = f"/proc/{entry}/fd"
    for number in os.listdir(folder):
        with contextlib.suppress(OSError):
            if os.readlink(f"{folder}/{number}").startswith(directory + "/"):
                return True
    return False


def end_marked(directory: str, patience_s: float = 10.0) -> None:
    """Kill marked processes until none is left: they may be starting others."""
    deadline = time.monotonic() + patience_s
    while (pids := marked(directory)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def main(directory: str, driver: int) -> None:
    """Wait until the driver is gone, then end everything that belongs to its local cluster."""
    # A forked child of the driver may hold the other end of the pipe: look at the parent, too.
    while os.getppid() == driver and not select.select([0], [], [], 0.5)[0]:
        pass
    end_marked(directory)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
