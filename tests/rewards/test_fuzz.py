"""Odd model output: no exception, no long time, a score in range; a label graded against itself is right."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards import RewardRequest, score
from rewards.text import math_equivalence, math_symbolic
from rewards.text.boxed import has_box, last_boxed
from rewards.text.math_symbolic import symbolically_equal

LIMIT_S = 0.1
METADATA = {"pattern": r"<a>.*</a>", "choices": ["red", "green", "blue", "grey"]}
LABELS: dict[str, Any] = {"math": "42", "dapo": "42", "deepscaler": "42", "gemma_math": r"\frac{1}{2}", "f1": "a cat"}
LABELS |= {"gpqa": "B", "format": None, "deterministic_random": None, "random": None}
NAMES = [*LABELS, *(f"boxed_{name}" for name in LABELS)]

LATEX = st.lists(
    st.sampled_from(
        [r"\frac", "{", "}", r"\sqrt", "^", "_", "(", ")", "[", "]", ",", r"\{", r"\}", r"\pm", r"\cup", r"\text{", "1",
         "2", "23", "0.5", "x", "y", "=", "+", "-", "/", r"\pi", r"\infty", r"\left", r"\right", "%", "$", r"\\", "!",
         r"\boxed{", "</think>", "Answer:", "<channel|>", " ", "\n", "10^{", "e", "E5", "°", "½", "and", r"\times"]
    ),
    max_size=30,
).map("".join)  # fmt: skip
TEXT = st.one_of(st.text(max_size=300), LATEX, LATEX.map(lambda body: rf"</think><channel|>Answer: \boxed{{{body}}}"))
LABEL = st.one_of(st.text(min_size=1, max_size=60), LATEX)


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    symbolically_equal((("x", "x"),))  # starts the helper process: once, not in a sample's time
    for name in NAMES:
        grade(name, r"\boxed{1}")


def grade(name: str, response: Any) -> Any:
    label = LABELS[name.removeprefix("boxed_")]
    return score([RewardRequest(response, label, metadata=METADATA, tokens=[1])], name)[0]


def check(name: str, response: Any) -> float:
    """Grade; check the range; return the seconds of processor time that the best of three takes."""
    result = grade(name, response)
    value = result["score"] if isinstance(result, dict) else result
    low = -1.0 if "dapo" in name else 0.0
    assert isinstance(value, float)
    assert low <= value <= 1.0
    best = float("inf")
    for _ in range(3):
        math_equivalence._equivalent.cache_clear()
        start = time.process_time()
        grade(name, response)
        best = min(best, time.process_time() - start)
    return best


@settings(max_examples=100, deadline=None)
@given(response=TEXT, name=st.sampled_from(NAMES))
def test_any_text_has_a_score_in_range_in_time(response: str, name: str) -> None:
    assert check(name, response) < LIMIT_S


@pytest.mark.slow
@settings(max_examples=2_000, deadline=None)
@given(response=TEXT, name=st.sampled_from(NAMES))
def test_more_text_has_a_score_in_range_in_time(response: str, name: str) -> None:
    assert check(name, response) < LIMIT_S


@settings(max_examples=100, deadline=None)
@given(label=LABEL)
def test_a_label_graded_against_itself_is_right(label: str) -> None:
    is_right_against_itself(label)


@pytest.mark.slow
@settings(max_examples=5_000, deadline=None)
@given(label=LABEL)
def test_more_labels_graded_against_themselves_are_right(label: str) -> None:
    is_right_against_itself(label)


def is_right_against_itself(label: str) -> None:
    if not label.strip() or (has_box(label) and not (last_boxed(label) or "").strip()):
        return  # no label: an error
    assert score([RewardRequest(label, label)], "math") == [1.0]
    assert score([RewardRequest(label, label)], "f1") == [1.0]
    markers = ("boxed", "fbox", "</think>", "<channel|>")
    if last_boxed(rf"\boxed{{{label}}}") == label and not any(marker in label for marker in markers):
        boxed = rf"</think><channel|> \boxed{{{label}}}"
        for name in ("math", "boxed_math", "deepscaler", "gemma_math", "boxed_f1"):
            assert score([RewardRequest(boxed, label)], name) == [1.0], name


NEST = 3000
HOSTILE = {
    "empty": "",
    "none": None,
    "no box": "I do not know.",
    "open brace": r"\boxed{42",
    "many open boxes": r"\boxed{" * 20_000,
    "megabyte": "word " * 200_000 + r"\boxed{41}",
    "megabyte of digits": "7" * 1_000_000,
    "megabyte in a box": r"\boxed{" + "x" * 1_000_000 + "}",
    "megabyte of answers": "Answer: A " * 100_000,
    "nested fractions": r"\boxed{" + r"\frac{1}{" * NEST + "2" + "}" * NEST + "}",
    "nested parentheses": r"\boxed{" + "(" * 400 + "1" + ")" * 400 + "}",
    "nested braces": r"\boxed{" + "{" * NEST + "1" + "}" * NEST + "}",
    "long number": r"\boxed{" + "9" * 10_000 + "}",
    "long fraction": r"\boxed{\frac{" + "9" * 450 + "}{" + "7" * 450 + "}}",
    "tower": r"\boxed{9^{9^{9^{9}}}}",
    "tower without braces": r"\boxed{9^9^9^9}",
    "powers of powers": r"\boxed{((10^{999})^{999})^{999}}",
    "hidden tower": r"\boxed{9^{9^{9x^{0}}}}",
    "factorial": r"\boxed{99999999!}",
    "factorial of factorial": r"\boxed{((9!)!)!}",
    "exponent": r"\boxed{1e999999999}",
    "sum": r"\boxed{\sum_{n=1}^{99999999} \frac{1}{n}}",
    "integral": r"\boxed{\int_0^1 e^{\sin(x^{x})} dx}",
    "expansion": r"\boxed{(a+b+c+d+e)^{99}-(a-b+c-d+e)^{99}}",
    "many roots": r"\boxed{" + "+".join(rf"\sqrt{{{n}}}" for n in range(2, 30)) + "}",
    "many parts": r"\boxed{" + ",".join(str(n) for n in range(300)) + "}",
    "commas": r"\boxed{" + "," * 900 + "}",
    "right to left": "התשובה היא \\boxed{٤١}",
    "emoji": "🎉" * 1000 + r"\boxed{4️⃣2️⃣}",
    "lone surrogate": "\ud800\\boxed{\udfff}",
    "null bytes": "\x00" * 1000 + "\\boxed{\x00}",
    "code": r"\boxed{__import__('os').system('touch /tmp/rewards-evaluated')}",
    "spaces": "\\boxed{" + " " * 19_000 + "}",
    "answer spaces": "answer" + " " * 50_000,
    "dollar signs": "$" * 900,
    "dots": "." * 900,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_output_is_wrong_and_quick(case: str) -> None:
    for name in NAMES:
        assert check(name, HOSTILE[case]) < LIMIT_S, name
        if not name.endswith("random"):
            result = grade(name, HOSTILE[case])
            value = result["acc"] if isinstance(result, dict) else result
            assert value <= 0.0 or "gpqa" in name, (name, result)


def test_symbolic_work_ends_at_its_limit_of_processor_time() -> None:
    helper = math_symbolic._helper()
    start = time.monotonic()
    slow = (
        r"\frac{\sin(x)^{9}\cos(y)^{9}}{\tan(x+y)^{7}}+\sqrt{x^{7}+y^{7}}",
        r"\frac{\sin(x+y)^{9}}{\cos(x)^{8}}+x^{y}",
    )
    assert not helper.equal((slow,) * 8, 0.05)
    assert time.monotonic() - start < 5.0
    assert symbolically_equal((("x+y", "y+x"),))  # it works on


def test_helper_stuck_in_one_long_operation_is_replaced() -> None:
    assert not math_symbolic.is_tractable("9^{9^{9}}")
    helper = math_symbolic._helper()
    assert not helper.equal((("9^{9^{9}}", "1"),), 0.05)  # past the guard: no signal ends this one
    assert symbolically_equal((("x+y", "y+x"),))
