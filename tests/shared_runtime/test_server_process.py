"""Server processes: ports, readiness, logs, ends. The small ones are Python's own HTTP server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from shared_runtime.engines.http import HttpError, call
from shared_runtime.engines.ports import PortReservation
from shared_runtime.engines.server_process import ServerError, ServerProcess

# Serves on the port that it is given, with a child beside it that would live for ever.
SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(str(child.pid).encode())
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def serve(tmp_path: Path, code: str = SERVER, name: str = "server") -> ServerProcess:
    return ServerProcess(
        name, lambda ports: [sys.executable, "-c", code, str(ports[0])], log=tmp_path / "logs" / f"{name}.log"
    )


def is_gone(pid: int, patience_s: float = 10.0) -> bool:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_ports_are_given_once() -> None:
    with ThreadPoolExecutor(8) as pool:
        reservations = list(pool.map(PortReservation, [5] * 40))
    ports = [port for reservation in reservations for port in reservation.ports]
    assert len(set(ports)) == len(ports) == 200
    other = "from shared_runtime.engines.ports import PortReservation; print(*PortReservation(50).ports)"
    printed = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=True).stdout
    assert not set(map(int, printed.split())) & set(ports)
    for reservation in reservations:
        reservation.release()


def test_ready_and_ended_with_its_children(tmp_path: Path) -> None:
    server = serve(tmp_path)
    server.wait_ready(timeout_s=60)
    child = int(call(server.url, timeout_s=5))
    assert server.is_alive()
    assert psutil.pid_exists(child)
    server.stop()
    assert is_gone(server.pid)
    assert is_gone(child)
    with pytest.raises(ServerError, match="server ended with status"):
        server.check_alive()


def test_a_frozen_server_can_be_ended(tmp_path: Path) -> None:
    server = serve(tmp_path)
    server.wait_ready(timeout_s=60)
    child = int(call(server.url, timeout_s=5))
    os.kill(server.pid, signal.SIGSTOP)
    assert server.is_alive()
    with pytest.raises(HttpError, match="no answer"):
        call(server.url, timeout_s=0.3)
    server.stop(patience_s=0.3)
    assert is_gone(server.pid)
    assert is_gone(child)


def test_a_start_that_fails_shows_the_last_lines(tmp_path: Path) -> None:
    server = serve(tmp_path, "print('loading'); raise SystemExit('no such model')", name="engine 3")
    with pytest.raises(ServerError, match=r"engine 3 ended with status 1 while it started(?s:.*)no such model"):
        server.wait_ready(timeout_s=60)


def test_a_start_that_takes_too_long(tmp_path: Path) -> None:
    server = serve(tmp_path, "import time; print('still loading', flush=True); time.sleep(1000)")
    time.sleep(1)
    with pytest.raises(ServerError, match=r"not ready within 0 s(?s:.*)still loading"):
        server.wait_ready(timeout_s=0)
    assert is_gone(server.pid)


@pytest.mark.parametrize("end", ["kill", "return"])
def test_it_ends_with_its_parent(tmp_path: Path, end: str) -> None:
    """Whether the parent is killed or forgets about it, and although the thread that asked for it is long gone."""
    driver = textwrap.dedent(f"""
        import os, signal, sys, threading
        from pathlib import Path
        from shared_runtime.engines.server_process import ServerProcess
        def start():
            global server
            server = ServerProcess("s", lambda ports: [sys.executable, "-c", {SERVER!r}, str(ports[0])],
                                   log=Path({str(tmp_path)!r}) / "log")
            server.wait_ready(60)
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        server.check_alive()
        print(server.pid, flush=True)
        if {end!r} == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    """)
    printed = subprocess.run([sys.executable, "-c", driver], capture_output=True, text=True).stdout
    assert is_gone(int(printed))


def test_errors_name_the_address_and_the_answer(tmp_path: Path) -> None:
    server = serve(tmp_path)
    server.wait_ready(timeout_s=60)
    with pytest.raises(HttpError, match="/verb answered 501") as caught:
        call(f"{server.url}/verb", {}, timeout_s=5)
    assert caught.value.status == 501
    server.stop()
    with pytest.raises(HttpError, match="no answer") as caught:
        call(f"{server.url}/verb", timeout_s=5)
    assert caught.value.status is None
