"""kill -9 of a trainer, an engine and the driver: each time the same command goes on, with the same numbers."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[2]
ROLLOUTS = 12
FLAGS = [
    *("--num-rollout", str(ROLLOUTS)),
    *("--rollout-batch-size", "16"),
    *("--save-interval", "2"),
    *("--eval-interval", "4"),
    *("--progress", "plain"),
    "--deterministic-mode",
]


def start(runs: Path, name: str, *flags: str) -> tuple[subprocess.Popen[str], Path]:
    """Start the recipe; return it and the file with its output."""
    output = runs / f"{name}.{time.monotonic_ns()}.log"
    driver = subprocess.Popen(
        [sys.executable, "scripts/run_llm_grpo.py", "--runs-dir", str(runs), "--run-name", name, *FLAGS, *flags],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=output.open("w"),
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    return driver, output


def steps(directory: Path) -> dict[int, dict[str, Any]]:
    """Metrics by step, without what the clock says. A last line that is being written is left out."""
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {row["step"]: {k: v for k, v in row.items() if not k.startswith(("perf/", "time"))} for row in rows}


def worker_pid(driver: int, role: str) -> int:
    """The process of a role's first worker, from the logs of the run's own cluster."""
    for child in psutil.Process(driver).children():
        command = child.cmdline()
        if any(argument.endswith("reaper.py") for argument in command):
            for log in Path(command[-2]).glob("session_latest/logs/worker-*.out"):
                if found := re.search(rf"^{role}\[0\] pid (\d+)$", log.read_text(), re.MULTILINE):
                    return int(found[1])
    raise AssertionError(f"no {role} worker below {driver}")


def kill_after(runs: Path, name: str, step: int, delay_s: float, victim: Callable[[int], int]) -> tuple[int, str]:
    """Run until a step is logged and a moment longer, kill -9; return exit status and output. Nothing may be left."""
    driver, output = start(runs, name)
    try:
        deadline = time.monotonic() + 400
        while step not in steps(runs / name):
            assert driver.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.02)
        time.sleep(delay_s)
        tree = psutil.Process(driver.pid).children(recursive=True)
        os.kill(victim(driver.pid), signal.SIGKILL)
        status = driver.wait(timeout=60)
        _, left = psutil.wait_procs(tree, timeout=20)
        assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
        return status, output.read_text()
    finally:
        if driver.poll() is None:
            os.killpg(driver.pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(1800)
def test_killed_runs_go_on_with_the_same_numbers(tmp_path: Path) -> None:
    # Without Ray: where the workers live doesn't change a number either.
    driver, output = start(tmp_path, "whole", "--in-process")
    assert driver.wait(timeout=400) == 0, output.read_text()

    moments = random.Random(0)
    for step, role in ((2, "actor"), (5, "rollout")):
        status, text = kill_after(
            tmp_path, "killed", step, moments.uniform(0, 0.5), lambda pid, role=role: worker_pid(pid, role)
        )
        assert status == 1
        assert "Traceback" not in text
        assert "raylet" not in text
        assert re.search(rf"error: {role} worker 0 \(pid \d+\) died: killed without a word", text)
    status, _ = kill_after(tmp_path, "killed", 8, moments.uniform(0, 0.5), lambda pid: pid)
    assert status == -signal.SIGKILL

    driver, output = start(tmp_path, "killed")
    assert driver.wait(timeout=400) == 0, output.read_text()
    whole, killed = steps(tmp_path / "whole"), steps(tmp_path / "killed")
    assert sorted(whole) == sorted(killed) == list(range(-1, ROLLOUTS))
    for step in whole:
        assert killed[step] == whole[step]
    checkpoints = tmp_path / "killed" / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {
        "iter_0000010",
        "iter_0000012",
        "latest_checkpointed_iteration.txt",
    }
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "killed/hf" / name).read_bytes() == (tmp_path / "whole/hf" / name).read_bytes()
