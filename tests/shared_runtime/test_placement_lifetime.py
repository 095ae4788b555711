"""However the driver ends, its processes and its temporary directory end with it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from shared_runtime.placement.cluster import ClusterError, check_capacity
from shared_runtime.placement.layout import Pool, lay_out
from shared_runtime.placement.processes import last_lines

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
        if number != signal.SIGKILL:
            names = {path.name.split("-pid")[0] for path in logs.iterdir()}
            assert names == {"actor-0", "rollout-0"}
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


def test_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    bar = "".join(f"\rloading {i}%" for i in range(0, 101, 10))
    log.write_bytes(b"x" * 50_000 + f"\nfirst\n\n{bar}\n*** SIGSEGV received ***\n".encode() + b"\xff\n")
    assert last_lines(log, count=4) == ["first", "loading 100%", "*** SIGSEGV received ***", "�"]
    assert last_lines(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("text", "lines", "oom", "how"),
    [
        ("pid: 1\nWorker exit detail: connection error code 2. End of file. SIGSEGV", [], 0, "SIGKILL"),
        ("End of file.", ["*** SIGSEGV received at time=1 on cpu 0 ***"], 0, r"crashed, \*\*\* SIGSEGV received"),
        ("End of file.", ["Fatal Python error: Aborted"], 3, "crashed, Fatal Python error: Aborted"),
        ("End of file.", [], 1, "kernel's out-of-memory killer"),
        ("Worker exit type: INTENDED_USER_EXIT. exit() was called", [], 0, "it called exit"),
        ("", [], 0, "no reason"),
    ],
)
def test_how_it_died(text: str, lines: list[str], oom: int, how: str) -> None:
    from shared_runtime.placement.failures import how_it_died

    assert re.search(how, how_it_died(RuntimeError(text), lines, oom))


@pytest.mark.parametrize(
    "text",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:1234",
        "Connection reset by peer",
        "[../third_party/gloo/gloo/transport/tcp/buffer.cc:72] Timed out waiting 1800000ms for recv operation",
        "NCCL error: remote process exited or there was a network error",
    ],
)
def test_a_lost_peer_is_not_the_reason(text: str) -> None:
    from ray.exceptions import RayTaskError

    from shared_runtime.placement.failures import Kind, classify

    def raised(error: Exception) -> Exception:
        return RayTaskError("call", f"traceback of {error}", error).as_instanceof_cause()

    assert classify(raised(RuntimeError(text))) is Kind.SECONDARY
    assert classify(raised(RuntimeError("CUDA out of memory"))) is Kind.RAISED
    assert classify(raised(ValueError("the store is closed"))) is Kind.RAISED


OWNER = """
import ray, sys
ray.init(address="local", num_cpus=2, num_gpus=0, include_dashboard=False, _node_ip_address="127.0.0.1")
print("address", ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""

USER = """
import sys
import my_hook
from shared_runtime.placement.cluster import ClusterError, ray_cluster
from shared_runtime.placement.layout import Pool, lay_out
from shared_runtime.placement.ray_group import RayWorkerGroup

address = sys.argv[1]
try:
    with ray_cluster(lay_out([Pool((3,), {"actor": 1})]), address=address):
        print("a cluster of 2 gave 3")
except ClusterError as error:
    print(error)
with ray_cluster(lay_out([Pool((1,), {"actor": 1})]), address=address) as cluster:
    print("local", cluster.local)
    group = RayWorkerGroup(my_hook.Hook, [{}], cluster=cluster, role="actor", collective=True)
    print(group.call("name"))
    group.shutdown()
with ray_cluster(lay_out([Pool((2,), {"actor": 1})]), address=address) as cluster:
    print(len(cluster.slots("actor")), "slots")
"""


@pytest.mark.ray
@pytest.mark.slow
def test_an_existing_cluster_is_used_and_left(tmp_path: Path) -> None:
    (tmp_path / "my_hook.py").write_text("class Hook:\n    def name(self):\n        return __name__\n")
    # Both without Ray's token, on the loopback interface only. A process keeps the mode of its first cluster, hence
    # a process of its own for the user, too.
    env = os.environ | {"RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(tmp_path)}
    pipe = subprocess.PIPE
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=pipe, stdout=pipe, text=True, env=env)
    assert owner.stdout is not None
    try:
        address = next(line.split()[1] for line in owner.stdout if line.startswith("address"))
        user = subprocess.run(
            [sys.executable, "-c", USER, address], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
        )
        assert user.returncode == 0, user.stderr
        refusal, *rest = user.stdout.splitlines()
        assert "needs 3 CPU (3 by node), the cluster has 2" in refusal
        # Hooks beside the user's script are found in the workers.
        assert rest == ["local False", "['my_hook']", "2 slots"]
        assert owner.poll() is None
    finally:
        owner.communicate(timeout=30)
