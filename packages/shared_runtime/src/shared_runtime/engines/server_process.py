"""A server in a process of its own: started on free ports, watched until it is ready, ended with all its children."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from shared_runtime.engines.http import HttpError, call
from shared_runtime.engines.ports import PortReservation
from shared_runtime.placement.processes import die_with_parent, end_processes, last_lines

_POLL_S = 0.2
_PROBE_TIMEOUT_S = 5.0


class ServerError(RuntimeError):
    """A server that did not start, or that is gone; the message has the last lines of its log."""


class ServerProcess:
    """A running server command.

    The constructor starts it and returns at once, so that several can start side by side; `wait_ready` waits. The
    server ends with `stop`, or when this process ends in any way.

    Args:
        name: What messages call it.
        command: Gives the command line for reserved ports; the server answers HTTP on the first of them.
        log: File that its output is appended to.
        num_ports: How many ports it is given.
        env: Environment variables besides those of this process.
        host: Address that it listens on.
        ready_path: Answers 200 as soon as requests are welcome.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[Sequence[int]], Sequence[str]],
        *,
        log: Path,
        num_ports: int = 1,
        env: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        ready_path: str = "/health",
    ) -> None:
        self.name, self.log, self._ready_path = name, log, ready_path
        self._ports = PortReservation(num_ports)
        self.url = f"http://{host}:{self._ports.ports[0]}"
        log.parent.mkdir(parents=True, exist_ok=True)
        words = list(command(self._ports.ports))
        with log.open("ab") as output:
            output.write(f"$ {' '.join(words)}\n".encode())
            output.flush()
            self._process = _spawner().submit(_spawn, words, os.environ | dict(env or {}), output.fileno()).result()

    @property
    def pid(self) -> int:
        """Process id of the server, which is its process group's too."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether the process is there; one that is frozen is."""
        return self._process.poll() is None

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the server takes requests.

        Raises:
            ServerError: It ended, or is not ready in time. Nothing of it is left then.
        """
        deadline = time.monotonic() + timeout_s
        while self.is_alive():
            with contextlib.suppress(HttpError):
                call(self.url + self._ready_path, timeout_s=_PROBE_TIMEOUT_S)
                return
            if time.monotonic() > deadline:
                self.stop(patience_s=0)
                raise ServerError(f"{self.name} was not ready within {timeout_s:.0f} s{self._last_words()}")
            time.sleep(_POLL_S)
        code = self._process.returncode
        self.stop(patience_s=0)
        raise ServerError(f"{self.name} ended with status {code} while it started{self._last_words()}")

    def check_alive(self) -> None:
        """Raise unless the process is there.

        Raises:
            ServerError: It has ended.
        """
        if not self.is_alive():
            raise ServerError(f"{self.name} ended with status {self._process.returncode}{self._last_words()}")

    def stop(self, patience_s: float = 10.0) -> None:
        """End the server and everything that it has started: politely, then by force after `patience_s`."""
        tree = self._tree()
        if patience_s > 0:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        end_processes(tree, patience_s=0)
        self._ports.release()

    def _tree(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).children(recursive=True)
        return []

    def _last_words(self) -> str:
        lines = last_lines(self.log)
        return f"; the last lines of {self.log}:\n" + "\n".join(f"    {line}" for line in lines)


@functools.cache
def _spawner() -> ThreadPoolExecutor:
    """A thread that lives as long as this process: the kernel's signal to orphans goes by the thread that forked."""
    return ThreadPoolExecutor(1, thread_name_prefix="server-spawner")


def _spawn(words: list[str], env: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        words,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C goes to the run, which then ends its servers
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
    )
