"""What importing the package costs, and that every registered reward exists."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rewards import RewardRequest, known_rm_types, score
from rewards.registry import REWARDS, load

HEAVY = ["torch", "ray", "numpy", "sympy", "math_verify", "transformers", "httpx", "PIL", "fastapi", "tyro", "yaml"]


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_is_light() -> None:
    code = f"""
import sys, time
before = time.process_time()
import rewards
seconds = time.process_time() - before
import json
print(json.dumps([seconds, [name for name in {HEAVY!r} if name in sys.modules]]))
"""
    seconds, loaded = min(json.loads(run(code)) for _ in range(3))
    assert loaded == []
    assert seconds < 0.2


def test_plain_answers_need_nothing_heavy() -> None:
    code = f"""
import sys
from rewards import RewardRequest, score
assert score([RewardRequest("1/2", "0.5"), RewardRequest("7", 8)], "math") == [1.0, 0.0]
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    assert run(code).strip() == "[]"


@pytest.mark.parametrize("name", known_rm_types())
def test_every_registered_reward_exists(name: str) -> None:
    assert callable(load(name))


def test_the_tables_of_the_readme_are_the_registry() -> None:
    readme = Path(__file__).parents[2] / "packages" / "rewards" / "README.md"
    rows = re.findall(r"^\| `(\w+)` \|", readme.read_text(), re.MULTILINE)
    extras = {spec.extra for spec in REWARDS.values()} | {"paddleocr", "serve", "ray"}
    rows = [row for row in rows if row != "rm_type"]  # the heading
    for extra in extras - {None}:
        rows.remove(str(extra))  # the table of the extras
    assert sorted(rows) == sorted(known_rm_types())


@pytest.mark.parametrize(
    ("name", "module"), [("ocr", "rapidocr_onnxruntime"), ("hps", "open_clip"), ("ifbench", "nltk")]
)
def test_a_missing_extra_is_named(name: str, module: str) -> None:
    code = f"""
import sys
sys.modules[{module!r}] = sys.modules["langdetect"] = None
from rewards import MissingExtraError, RewardRequest, score
try:
    metadata = {{"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{{}}]}}
    score([RewardRequest("x", prompt='"x"', image=[[0.0]], metadata=metadata)], {name!r})
except MissingExtraError as error:
    print(error)
"""
    assert f"tandem-rewards[{REWARDS[name].extra}]" in run(code)


def test_symbolic_grading_works_off_the_main_thread_and_in_several() -> None:
    pairs = [(rf"\boxed{{x+{n}y}}", f"{n}y+x") for n in range(2, 8)] + [(r"\boxed{x+y}", "x-y")]
    results: dict[int, list[object]] = {}

    def work(index: int) -> None:
        results[index] = list(score([RewardRequest(*pair) for pair in pairs], "math"))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {index: [1.0] * 6 + [0.0] for index in range(4)}


def test_symbolic_grading_works_after_a_fork() -> None:
    code = """
import os, sys
from rewards import RewardRequest, score
assert score([RewardRequest("x+y", "y+x")], "math") == [1.0]
child = os.fork()
if child == 0:
    ok = score([RewardRequest("x+2y", "2y+x")], "math") == [1.0]
    os._exit(0 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert score([RewardRequest("x+3y", "3y+x")], "math") == [1.0]
print("fine")
"""
    assert run(code).strip() == "fine"
