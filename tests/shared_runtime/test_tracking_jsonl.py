"""metrics.jsonl and samples.jsonl: what a killed, resumed or failing writer leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_runtime.tracking.jsonl import JsonlFile, JsonlSink, read_rows
from shared_runtime.tracking.sink import TrackingError


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_object_a_line_with_step_first(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl", tmp_path / "samples.jsonl")
    sink.log(0, {"train/loss": 0.5, "train/grad_norm": None})
    sink.log_samples(0, [{"prompt": "1+1=", "reward": 1.0}, {"prompt": "größer\n", "reward": float("nan")}])
    # Nothing is closed: a row is in the file as soon as it is logged.
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step":0,"train/loss":0.5,"train/grad_norm":null}\n'
    assert lines(tmp_path / "samples.jsonl") == [
        {"step": 0, "prompt": "1+1=", "reward": 1.0},
        {"step": 0, "prompt": "größer\n", "reward": None},
    ]
    sink.close()


@pytest.mark.parametrize("cut", range(1, 19))
def test_torn_last_line_is_repaired_at_any_byte(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 0, "a": 1}\n'
    path.write_bytes(whole + whole[:cut])
    file = JsonlFile(path)
    file.append([{"step": 1, "a": 2}])
    file.close()
    assert lines(path) == [{"step": 0, "a": 1}, {"step": 1, "a": 2}]


def test_whole_last_line_without_newline_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1}')
    assert [row["step"] for row in read_rows(path)] == [0, 1]
    file = JsonlFile(path)
    file.append([{"step": 2}])
    file.close()
    assert [row["step"] for row in lines(path)] == [0, 1, 2]


def test_torn_line_longer_than_a_read_block(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b'{"step": 0}\n{"step": 1, "response": "' + b"x" * 200_000)
    JsonlFile(path).close()
    assert path.read_bytes() == b'{"step": 0}\n'


def test_reader_passes_over_a_torn_end_but_names_a_broken_middle(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n{"st')
    assert list(read_rows(path)) == [{"step": 0}]
    path.write_bytes(b'{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(TrackingError, match=r"metrics\.jsonl:2: not a JSON object"):
        list(read_rows(path))


def test_killed_writer_loses_no_row_that_was_logged(tmp_path):
    script = (
        "import sys; from pathlib import Path; from shared_runtime.tracking.jsonl import JsonlSink\n"
        "sink = JsonlSink(Path(sys.argv[1]))\n"
        "for step in range(10**9):\n"
        "    sink.log(step, {'a': 0.1})\n"
        "    print(step, flush=True)\n"
    )
    path = tmp_path / "metrics.jsonl"
    process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    announced = [int(process.stdout.readline()) for _ in range(50)][-1]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    JsonlFile(path).close()
    steps = [row["step"] for row in lines(path)]
    assert steps == list(range(len(steps)))
    assert len(steps) > announced


def test_truncate_after_drops_exactly_the_later_rows(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl", tmp_path / "samples.jsonl")
    for step in range(5):
        sink.log(step, {"a": step})
        sink.log_samples(step, [{"i": 0}, {"i": 1}])
    sink.truncate_after(2)
    sink.log(3, {"a": 30})
    sink.close()
    assert [(row["step"], row["a"]) for row in lines(tmp_path / "metrics.jsonl")] == [(0, 0), (1, 1), (2, 2), (3, 30)]
    assert [row["step"] for row in lines(tmp_path / "samples.jsonl")] == [0, 0, 1, 1, 2, 2]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["metrics.jsonl", "samples.jsonl"]


@given(st.lists(st.integers(-1, 9), max_size=12), st.integers(-2, 9))
def test_truncate_after_equals_a_filter(tmp_path_factory, steps, last):
    path = tmp_path_factory.mktemp("rows") / "metrics.jsonl"
    file = JsonlFile(path)
    file.append([{"step": step, "n": n} for n, step in enumerate(steps)])
    file.truncate_after(last)
    file.close()
    assert lines(path) == [{"step": step, "n": n} for n, step in enumerate(steps) if step <= last]


def test_full_disk_is_an_error_and_leaves_whole_rows(tmp_path):
    """A file-size limit of the kernel stands for the full disk: the write comes back short, then fails."""
    script = (
        "import resource, sys; from pathlib import Path; from shared_runtime.tracking import *\n"
        "from shared_runtime.tracking.jsonl import JsonlSink\n"
        "tracker = Tracker([JsonlSink(Path(sys.argv[1]))])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "for step in range(100): tracker.log(step, {'a': 0.5})\n"
    )
    path = tmp_path / "metrics.jsonl"
    run = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True)
    assert run.returncode != 0
    assert f"TrackingError: can't write {path}: File too large" in run.stderr
    assert not path.read_bytes().endswith(b"\n")  # the failed row is torn ...
    JsonlFile(path).close()
    assert [row["step"] for row in lines(path)] == list(range(len(lines(path))))  # ... and repaired
    assert sum(len(f'{{"step":{step},"a":0.5}}\n') for step in range(len(lines(path)))) <= 1000 - 1
    assert len(lines(path)) > 40


def test_unwritable_directory_is_an_error_at_the_door(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(TrackingError, match="can't open"):
        JsonlSink(tmp_path / "metrics.jsonl")


def test_values_that_json_lacks(tmp_path):
    class Colour(Enum):
        RED = "red"

    file = JsonlFile(tmp_path / "samples.jsonl")
    row = {
        "array": np.arange(3),
        "scalar": np.float32(0.5),
        "enum": Colour.RED,
        "path": Path("a/b"),
        "nested": [{"x": float("inf")}, ("t", 1)],
        "surrogate": "a\udc80b",
        3: True,
    }
    file.append([{"step": 0, **row}])
    assert lines(tmp_path / "samples.jsonl") == [
        {
            "step": 0, "array": [0, 1, 2], "scalar": 0.5, "enum": "red", "path": "a/b",
            "nested": [{"x": None}, ["t", 1]], "surrogate": "a\udc80b", "3": True,
        }
    ]  # fmt: skip
    with pytest.raises(TrackingError, match="step 7 is no JSON: a object"):
        file.append([{"step": 7, "what": object()}])
    assert len(lines(tmp_path / "samples.jsonl")) == 1
    file.close()


def test_forked_child_shares_no_state(tmp_path):
    """Appends of a parent and a forked child interleave as whole lines (O_APPEND), none is written twice."""
    file = JsonlFile(tmp_path / "metrics.jsonl")
    file.append([{"step": 0}])
    child = os.fork()
    if child == 0:
        file.append([{"step": 1}])
        os._exit(0)
    os.waitpid(child, 0)
    file.append([{"step": 2}])
    file.close()
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]
