"""`code`: does the program pass its tests?"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rewards.request import LabelError
from rewards.text.sandbox import Limits, run_program

_FENCE = re.compile(r"```(?:python|py|python3)?[ \t]*\r?\n(.*?)```", re.DOTALL | re.IGNORECASE)
_MAX_PROGRAM = 100_000

_CALLS = """
import json as _json
_function = globals().get({name!r}) or getattr(globals()["Solution"](), {name!r})
for _arguments, _expected in _json.loads({cases!r}):
    assert _json.loads(_json.dumps(_function(*_arguments))) == _expected
"""


def grade(response: str, label: Any, *, timeout_s: float = 5.0, memory_mb: int = 1024, partial: bool = False) -> float:
    """1.0 if the program passes every test, else 0.0; with `partial`, the share of the tests it passes.

    The program is the last fenced block of the response after any `</think>`, else the whole response. It runs in the
    sandbox of `run_program`: a process of its own without network, children, or files outside its directory.

    Args:
        response: What the model wrote. A program over 100,000 characters scores 0.
        label: The tests, or JSON of them:
            a string of Python that raises where the program is wrong (asserts, `unittest`);
            a list of `{"input": stdin, "output": stdout}`;
            or `{"inputs": [...], "outputs": [...]}`, with `"fn_name"` to call a function (of `Solution`, if that class
            has it) with each list of arguments in place of running the program on each standard input.
        timeout_s: Seconds a run. A list of n inputs is n runs; a failed one ends the grading unless `partial`.
        memory_mb: Address space of the process in MiB.
        partial: Score the share.

    Raises:
        LabelError: The label holds no tests.
        RewardError: This machine cannot lock the sandbox down.
    """
    tests = _tests(label)
    source = _program(response)
    limits = Limits(timeout_s=timeout_s, memory_mb=memory_mb)
    if not source.strip() or len(source) > _MAX_PROGRAM:
        return 0.0
    if isinstance(tests, str):
        return float(run_program(source, tests=tests, limits=limits).passed)
    passed = 0
    for stdin, expected in tests:
        outcome = run_program(source, stdin=stdin, limits=limits)
        if outcome.passed and _lines(outcome.stdout) == _lines(expected):
            passed += 1
        elif not partial:
            return 0.0
    return passed / len(tests)


def _program(response: str) -> str:
    text = response.rpartition("</think>")[2]
    blocks = _FENCE.findall(text)
    return blocks[-1] if blocks else text


def _lines(text: str) -> list[str]:
    """Output as judges compare it: trailing spaces and empty last lines do not count."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _tests(label: Any) -> str | list[tuple[str, str]]:
    if isinstance(label, str) and label.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError):  # Python that begins with a bracket
            label = json.loads(label)
    if isinstance(label, str) and label.strip():
        return label
    if isinstance(label, Mapping):
        inputs, outputs = label.get("inputs"), label.get("outputs")
        if not inputs or not isinstance(outputs, Sequence) or len(inputs) != len(outputs):
            raise LabelError("label holds no tests: 'inputs' and 'outputs' are to be lists of one length")
        if label.get("fn_name"):
            cases = json.dumps([[list(given), wanted] for given, wanted in zip(inputs, outputs, strict=True)])
            return _CALLS.format(name=str(label["fn_name"]), cases=cases)
        return [(str(given), str(wanted)) for given, wanted in zip(inputs, outputs, strict=True)]
    if isinstance(label, Sequence) and not isinstance(label, str) and label:
        if all(isinstance(entry, str) for entry in label):
            return "\n".join(label)
        if all(isinstance(entry, Mapping) and {"input", "output"} <= entry.keys() for entry in label):
            return [(str(entry["input"]), str(entry["output"])) for entry in label]
    raise LabelError(
        f"label {label!r:.200} holds no tests: Python source, a list of {{'input', 'output'}}, "
        "or {'inputs', 'outputs'} with an optional 'fn_name'"
    )
