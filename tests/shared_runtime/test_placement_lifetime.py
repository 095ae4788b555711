"""However the driver ends, its processes and its temporary directory end with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shared_runtime.placement.cluster import ClusterError, check_capacity
from shared_runtime.placement.layout import Pool, lay_out

DRIVER = Path(__file__).with_name("placement_driver.py")


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_nothing_stays_behind(tmp_path: Path, number: signal.Signals, code: int) -> None:
    report, logs = tmp_path / "report.json", tmp_path / "logs"
    output = (tmp_path / "output").open("w")
    # Ctrl-C reaches the whole foreground group; a session of its own keeps it away from the tests.
    driver = subprocess.Popen(
        [sys.executable, str(DRIVER), str(report), str(logs)], stdout=output, stderr=output, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 180
        while not report.exists() and driver.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        facts = json.loads(report.read_text())
        tree = psutil.Process(driver.pid).children(recursive=True)
        names = [process.name() for process in tree]
        assert "raylet" in names
        assert "gcs_server" in names
        assert {*facts["pids"], facts["child"]} <= {process.pid for process in tree}
        time.sleep(0.5)
        if number == signal.SIGINT:
            os.killpg(driver.pid, number)
        else:
            driver.send_signal(number)
        assert driver.wait(timeout=30) == code
        # What a killed driver leaves to the kernel and to Ray takes a moment.
        _, left = psutil.wait_procs(tree, timeout=20)
        assert not alive(left)
        assert not Path(facts["temp_dir"]).exists()
    finally:
        for process in [driver.pid] if driver.poll() is None else []:
            os.killpg(process, signal.SIGKILL)


def test_capacity() -> None:
    layout = lay_out([Pool((4, 4), {"actor": 1}), Pool((2,), {"rollout": 1})])
    check_capacity(layout, [6, 4], "GPU")
    check_capacity(layout, [10], "GPU")
    with pytest.raises(ClusterError, match=r"needs 10 GPU \(4 \+ 4 \+ 2 by node\), .* has 9 \(3 \+ 6 by node\)"):
        check_capacity(layout, [3, 6], "GPU")
    with pytest.raises(ClusterError, match="--colocate"):
        check_capacity(layout, [], "GPU")


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, time\n"
        "from functools import partial\n"
        "from shared_runtime.placement.processes import die_with_parent\n"
        "child = subprocess.Popen(['sleep', '600'], preexec_fn=partial(die_with_parent, os.getpid()))\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    psutil.wait_procs([child], timeout=5)
    assert not alive([child])
