"""`code`: programs that pass, that fail, and that misbehave."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest

from rewards import LabelError, RewardRequest, score
from rewards.text.code import grade
from rewards.text.sandbox import Limits, run_program

ADD = "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
ECHO = "```python\nprint(sum(map(int, input().split())))\n```"
QUICK = Limits(timeout_s=2.0)


def test_programs_are_right_or_wrong() -> None:
    assert grade(ADD, "assert add(1, 2) == 3") == 1.0
    assert grade(ADD, "assert add(1, 2) == 4") == 0.0
    assert grade(ADD, ["assert add(1, 2) == 3", "assert add(0, 0) == 0"]) == 1.0
    assert grade(ADD, {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}) == 1.0
    assert grade(ADD, {"fn_name": "add", "inputs": [[1, 2]], "outputs": [4]}) == 0.0
    method = "class Solution:\n    def twice(self, x):\n        return (x, x)"
    assert grade(method, {"fn_name": "twice", "inputs": [[1]], "outputs": [[1, 1]]}) == 1.0
    assert grade(ECHO, '[{"input": "1 2\\n", "output": "3"}]') == 1.0
    assert grade("syntax error (", "pass") == 0.0
    assert grade("", "pass") == 0.0
    unit = "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        assert add(1, 1) == {}\n"
    assert grade(ADD, unit.format(2) + "unittest.main()") == 1.0
    assert grade(ADD, unit.format(3) + "unittest.main()") == 0.0


def test_partial_is_the_share_of_the_tests() -> None:
    tests = {"inputs": ["1 2", "2 2", "5 5"], "outputs": ["3", "5", "10"]}
    assert grade(ECHO, tests) == 0.0
    assert grade(ECHO, tests, partial=True) == pytest.approx(2 / 3)


def test_leaving_early_is_not_passing() -> None:
    for source in ("import os\nos._exit(0)", "raise SystemExit", "import sys\nsys.exit(0)"):
        assert grade(source, "assert False") == 0.0


@pytest.mark.parametrize(
    "source",
    [
        "import socket\nsocket.socket()",
        "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1')",
        "import os\nos.fork()",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.kill(os.getppid(), 9)",
        "import os\nos.kill(os.getpid(), 0)",
        "import ctypes, os\nassert ctypes.CDLL(None).syscall(234, os.getppid(), os.getppid(), 9) == 0",
        "import os\nopen(f'/proc/{{os.getppid()}}/environ', 'rb').read()",
        "import os\nopen(f'/proc/{{os.getppid()}}/mem', 'rb').read(1)",
        "import resource, os\nresource.prlimit(os.getppid(), resource.RLIMIT_CPU)",
        "x = bytearray(3 << 30)",
        "open('{outside}', 'w')",
        "open('{kept}').read()",
        "import os\nos.remove('{kept}')",
        "import os\nos.truncate('{kept}', 0)",
        "import os\nos.rename('{kept}', 'here')",
        "import os\nos.chmod('{kept}', 0o777)",
        "import os\nos.utime('{kept}', (0, 0))",
        "import os\nos.setxattr('{kept}', 'user.a', b'b')",
        "import os\nos.listdir('{kept}'.rpartition('/')[0])",
        "import os\nos.listdir(f'/proc/{{os.getppid()}}/fd')",
        "import os\nos.symlink('{kept}', 'here')\nopen('here').read()",
        "open('/proc/self/root{kept}').read()",
        "import os\nos.mkdir('deep')",
        "import os\nos.execv('/bin/true', ['true'])",
        "import os\nos.setpriority(os.PRIO_PROCESS, os.getppid(), 5)",
        "import os\nos.sched_setaffinity(os.getppid(), {{0}})",
        "import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "import socket\nsocket.sethostname(socket.gethostname())",
        "import time\ntime.clock_settime(0, time.time())",
        "import ctypes\nassert ctypes.CDLL(None).shmget(0x7EED, 4096, 0o1600) >= 0",
        "import ctypes\nassert ctypes.CDLL(None).unshare(0x10000000) == 0",
    ],
)
def test_what_a_program_may_not_do(source: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("content")
    before = kept.stat()
    outcome = run_program(source.format(outside=tmp_path / "new", kept=kept), limits=QUICK)
    assert not outcome.passed
    assert not (tmp_path / "new").exists()
    assert kept.read_text() == "content"
    assert (kept.stat().st_mode, kept.stat().st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


def test_what_a_program_may_do() -> None:
    source = "import threading\nopen('f', 'w').write('a')\nt = threading.Thread(target=print, args=('b',))\nt.start()\n"
    outcome = run_program(source + "t.join()\nopen('/dev/null', 'w').write('x')\nprint(open('f').read())")
    assert (outcome.passed, outcome.stdout) == (True, "b\na\n")
    assert run_program("import asyncio\nasyncio.run(asyncio.sleep(0))").passed
    imports = "import random, zoneinfo, ctypes.util, sqlite3, decimal, unittest, multiprocessing"
    assert run_program(imports + "\nprint(random.SystemRandom().random())").passed
    assert run_program("import numpy\nprint(numpy.arange(3).sum())").stdout == "3\n"


def test_secrets_of_the_environment_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "secret-value")
    assert "secret-value" not in run_program("import os\nprint(dict(os.environ))").stdout


def test_limits_of_time_and_output() -> None:
    for source in ("while True: pass", "import time\ntime.sleep(60)"):
        start = time.monotonic()
        outcome = run_program(source, limits=Limits(timeout_s=1.0))
        assert outcome.timed_out
        assert not outcome.passed
        assert time.monotonic() - start < 5.0
    outcome = run_program("while True: print('x' * 1000)", limits=Limits(timeout_s=5.0, output_kb=64))
    assert not outcome.passed
    assert len(outcome.stdout) <= 64 * 1024


def test_files_have_a_limit_together() -> None:
    source = "n = 0\nwhile True:\n    open(f'f{n}', 'wb').write(b'0' * 1000_000)\n    n += 1"
    start = time.monotonic()
    outcome = run_program(source, limits=Limits(timeout_s=30.0, disk_mb=8))
    assert (outcome.passed, outcome.timed_out) == (False, False)
    assert time.monotonic() - start < 15.0


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_program("open('f', 'w').write('a' * 1000)\nimport time\ntime.sleep(60)", limits=Limits(timeout_s=0.5))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("label", [[], {}, "", "[]", {"inputs": ["1"], "outputs": []}, 7])
def test_labels_without_tests_name_the_sample(label: object) -> None:
    with pytest.raises(LabelError, match="sample 5"):
        score([RewardRequest(ADD, label, sample_id=5)], "code")
