"""`math`: answers that are the same, answers that are not, and what no answer is."""

from __future__ import annotations

import random
import time

import pytest

from rewards import LabelError, RewardRequest, score
from rewards.text import math_equivalence
from rewards.text.boxed import last_boxed
from rewards.text.math import grade

# What a mathematician calls the same, and what not: written by hand, grouped as the docstring groups them.
SAME = [
    # integers, thousands, decimals
    ("95", "95"), ("1,234", "1234"), ("1{,}234", "1234"), (r"1\,000\,000", "1000000"), ("100 000", "100,000"),
    (".5", "0.50"), ("1.", "1"), ("-0", "0"), ("007", "7"), ("- 5", "-5"), ("−5", "-5"), ("+5", "5"), ("５", "5"),
    ("٤٢", "42"), (r"1.5\times10^3", "1500"), ("1e3", "1000"), (r"2\cdot 10^{-2}", "0.02"),
    # fractions, mixed numbers, percent
    (r"\frac{1}{2}", "0.5"), (r"\frac12", "1/2"), (r"\dfrac34", "0.75"), (r"\tfrac{3}4", "3/4"), ("2/4", "1/2"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"), (r"\frac{1}{-2}", "-0.5"), (r"1\frac12", "1.5"), ("1 1/2", "3/2"),
    ("½", "0.5"), ("3½", "3.5"), ("50%", "50"), (r"50\%", "0.5"), ("0.333333", "1/3"), ("0.666667", r"\frac{2}{3}"),
    (r"0.1\overline{6}", "1/6"), (r"0.\overline{3}", r"\frac13"), (r"-2.\overline{09}", "-23/11"),
    # degrees, units, money
    (r"5\ \text{hours}", "5 hours"), (r"5 \ \mathrm{cm}", "5"), (r"\frac{1}{2}\text{ cup}", "0.5"),
    (r"90^\circ", "90"), (r"90^{\circ}", r"90\text{ degrees}"), ("90°", "90"), (r"5\text{ cm}", "5"), ("5 cm", "5"),
    (r"12\text{ cm}^2", "12 cm^2"), (r"12\text{ square units}", "12"), (r"\$5", "5"), ("$5$", "5"), ("5 inches", "5"),
    (r"10\mathrm{~km}", "10 kilometers"), (r"18\text{ apples}", "18"), (r"5\sqrt{2} cm", r"5\sqrt2"),
    # names
    ("x=5", "5"), ("5", "x = 5"), ("x=5", "x=5.0"), (r"x \in [1,2]", "[1,2]"), ("f(x)=x^2", "x^2"), ("x_1=3", "3"),
    # tuples, intervals, sets, lists
    ("(1, 2)", "(1,2)"), (r"\left(1,\frac12\right)", "(1,0.5)"), (r"[1,+\infty)", r"[1,\infty)"),
    (r"\{1,2\}", r"\{2, 1\}"), (r"\left\{3,1,2\right\}", r"\{1,2,3\}"), ("1,2", "2,1"), ("5 or -3", "-3,5"),
    (r"1\text{ and }2", "2, 1"), (r"\pm 2", "2,-2"), (r"x=2, x=-2", "-2,2"), (r"(\sqrt4,2)", "(2,2)"),
    ("{1,2}", r"\{2,1\}"), ("{{5}}", "5"), ("{1,2}", "{2,1}"), ("(-inf, 3]", r"(-\infty,3]"),
    (r"(-\infty,1]\cup[2,\infty)", r"[2,+\infty)\cup(-\infty,1]"), ("(5)", "5"), (r"\emptyset", r"\varnothing"),
    # words and letters
    (r"\text{East}", "east"), (r"\textbf{no solution}", "No solution"), ("(B)", "B"), (r"\text{(B)}", "B"), ("B.", "B"),
    # algebra
    ("2(3)", "6"), ("2^{-1}", "0.5"), ("(2+3)*4/5", "4"), ("-(-5)", "5"), (r"\angle ABC = 30^\circ", "30"),
    ("sqrt(8)", r"2\sqrt{2}"), ("2pi", r"2\pi"), ("pi/2", r"\frac{\pi}{2}"),
    ("e^0", "1"), (r"\sin(0)", "0"), (r"|-5|", "5"), ("2^{10}", "1024"),
    ("2¹⁰", "1024"), ("2+3", "5"), (r"\sqrt{12}", r"2\sqrt{3}"), (r"2\sqrt3", r"\sqrt{12}"),
    (r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt{2}}"), (r"\frac{\pi}{2}", r"\pi/2"), ("3π", r"3\pi"), ("3.141593", r"\pi"),
    ("x+y", "y+x"), ("(x+1)^2", "x^2+2x+1"), (r"\frac{x}{2}", "0.5x"), ("y=2x+3", "y=3+2x"), ("10!", "3628800"),
    (r"2\pm\sqrt{3}", r"2-\sqrt3, 2+\sqrt3"), (r"\log_2 8", "3"), (r"\binom{5}{2}", "10"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ \frac{4}{2} \end{pmatrix}"),
]  # fmt: skip
DIFFERENT = [
    ("95", "96"), ("-5", "5"), ("5", "-5"), ("1000000", "1000001"), ("0.33", "1/3"), ("3.14", r"\pi"),
    ("1,234", "1.234"),
    ("{1,2}", "(1,2)"), (r"0.\overline{3}", "0.3"), ("{1},{2}", "{1}"), ("sqrt(8)", "2"), ("2pi", "2"),
    ("(1,2)", "(2,1)"), ("[1,2)", "(1,2)"), ("(1,2)", "(1,2,3)"), (r"(\sqrt4,2)", "(3,3)"), (r"\{1,2\}", r"\{1,3\}"),
    (r"\{1,1\}", r"\{1,2\}"), ("1,2", "1"), ("east", "west"), ("A", "B"), ("yes", "no"), ("5 cm", r"5\text{ m}"),
    ("50", "0.5"), ("5%", "50%"), ("2x", "2"), ("5m", "5"), ("x^2", "x^3"), (r"\sqrt{2}", r"\sqrt{3}"),
    ("2^{10}", "1025"),
    (r"\frac{1}{0}", "1"), (r"1\frac12", "1/2"), ("x=5", "x=6"), ("x=y", "x=z"), (r"\pi", "3"), (r"2\pm\sqrt{3}", "2"),
    ("2+3", "6"), ("2++", "2"), ("1/0", "0"), ("2^", "2"), ("9^99999999", "9"), ("7=", "7"),
    ("2+3=5", "6"), ("x5", "5"), ("2,34", "2"),
    ("x>3", "x<3"), ("6!", "6"), ("ten", "tenth"), (r"\frac{2}{3}", r"\frac{3}{2}"), ("i", "1"), ("-x", "x"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "label"), SAME)
def test_same_answers(answer: str, label: str) -> None:
    assert grade(rf"so it is $\boxed{{{answer}}}$.", label) == 1.0


@pytest.mark.parametrize(("answer", "label"), DIFFERENT)
def test_different_answers(answer: str, label: str) -> None:
    assert grade(rf"so it is $\boxed{{{answer}}}$.", label) == 0.0


def test_the_last_box_counts_with_nested_braces() -> None:
    assert grade(r"\boxed{1} no: \boxed{\frac{1}{\sqrt{4}}}", "1/2") == 1.0
    assert last_boxed(r"\boxed{\frac{a}{b_{c}}} tail") == r"\frac{a}{b_{c}}"
    assert last_boxed(r"\boxed{\{1,2\}}") == r"\{1,2\}"
    assert last_boxed(r"\fbox{7} \boxed 5 ") == "5"
    assert last_boxed(r"so \fbox{7}.") == "7"
    assert last_boxed(r"\boxed{5") is None
    assert last_boxed(r"\boxedness{5}") is None


def test_response_that_is_only_an_answer_needs_no_box() -> None:
    assert [grade(text, "132") for text in ("132", " 132\n", "$132$", "x = 132")] == [1.0] * 4
    assert [grade(text, "132") for text in ("The answer is 132", r"\boxed{132", "131\n132", "")] == [0.0] * 4
    requests = [RewardRequest("132", "132"), RewardRequest(r"\boxed{132}", "132")]
    assert score(requests, "boxed_math") == [0.0, 1.0]


def test_labels_may_be_numbers_and_boxes() -> None:
    assert grade(r"\boxed{0}", 0) == 1.0
    assert grade(r"\boxed{5}", 0) == 0.0
    assert grade(r"\boxed{0.5}", 0.5) == 1.0
    assert grade(r"\boxed{5}", 5.0) == 1.0
    assert grade("5", r"So the answer is \boxed{5}.") == 1.0


@pytest.mark.parametrize("label", [None, "", "   ", float("nan"), [1], r"\boxed{5", True])
def test_bad_labels_are_errors_that_name_the_sample(label: object) -> None:
    with pytest.raises(LabelError, match="sample row-7"):
        score([RewardRequest(r"\boxed{5}", label, sample_id="row-7")], "math")


def test_a_step_of_short_answers_costs_little() -> None:
    requests = [RewardRequest(str(i % 200), "95") for i in range(512)]
    score(requests, "math")
    best = min(_seconds(lambda: score(requests, "math")) for _ in range(5))
    assert best < 0.010


def test_what_an_untrained_policy_writes_never_reaches_the_algebra(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise AssertionError("asked the algebra")

    monkeypatch.setattr(math_equivalence, "symbolically_equal", refuse)
    alphabet = "0123456789+-*/=()^ .,abxyz?!'\"#"
    generator = random.Random(0)
    junk = ["".join(generator.choices(alphabet.replace("!", ""), k=generator.randrange(1, 8))) for _ in range(3000)]
    scores = score([RewardRequest(text, "95") for text in [*junk, "日本5", "🎉", "\x00", "..."]], "math")
    assert set(scores) <= {0.0, 1.0}
    assert scores[-4:] == [0.0] * 4


def _seconds(call: object) -> float:
    start = time.perf_counter()
    call()  # type: ignore[operator]
    return time.perf_counter() - start
