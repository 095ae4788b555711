"""`math`: does the boxed answer equal the label?"""

from __future__ import annotations

import math
from typing import Any

from rewards.request import LabelError
from rewards.text.boxed import has_box, last_boxed
from rewards.text.math_equivalence import equivalent

_MAX_BARE_ANSWER = 200


def grade(response: str, label: Any, *, symbolic: bool = True) -> float:
    """1.0 if the response's final answer equals the label, else 0.0.

    The answer is the content of the last `\\boxed{}`. A response without a box is graded as it is when all of it is
    one short line ("132", "$\\frac12$", "x = 5"): nothing is searched for in prose, so "The answer is 132" scores 0,
    and so does a box whose brace never closes. `boxed_math` insists on the box.

    Two answers are equal if one of these says so:

    1. Spelling, after the normalisation of Hendrycks et al. (2021), https://arxiv.org/abs/2103.03874: LaTeX spacing,
       `\\left`, `\\text`, `\\dfrac`, dollar signs, degrees, `x=`.
    2. Exact numbers: thousands separators, decimals, fractions, mixed numbers, powers of ten, percent, units (which
       must agree where both answers have one).
    3. Structure: tuples and intervals part by part (order and brackets matter), sets, unions and bare lists in any
       order, words without regard to case.
    4. Algebra, by math-verify and sympy, within 80 ms of processor time: surds, pi, polynomials, equations, matrices.

    Published graders differ on some pairs. Here the value counts, as in math-verify, not the form: 2/4 is 1/2
    (Hendrycks' strings and the PRM800K grader refuse an unreduced fraction), 2^{10} is 1024 and 2+3 is 5 (the
    PRM800K grader wants an integer where the label is one). A policy is thus not punished for an answer that is right;
    a prompt that asks for reduced form needs a grader of its own. 50% equals both 50 (Hendrycks) and 0.5
    (math-verify). 0.333333 is 1/3 from six correctly rounded decimals on, 0.33 is not. (1,2) is not [1,2].

    Args:
        response: What the model wrote. Any text; odd text scores 0.
        label: The reference answer: a string (a box in it is opened), an int or a finite float.
        symbolic: Whether to take step 4.

    Raises:
        LabelError: The label is no answer: `None`, empty, a list, or an open box.
    """
    reference = label if label.__class__ is str and "\\" not in label and label.strip() else label_text(label)
    if has_box(response):
        answer = last_boxed(response)
    else:
        answer = response.strip()
        if (len(answer) > _MAX_BARE_ANSWER or "\n" in answer) and answer != reference.strip():
            return 0.0
    if not answer:
        return 0.0
    return 1.0 if equivalent(answer, reference, symbolic) else 0.0


def label_text(label: Any) -> str:
    """The reference answer as a string.

    Raises:
        LabelError: It is no answer.
    """
    if isinstance(label, bool) or not isinstance(label, str | int | float):
        raise LabelError(f"label {label!r:.200} is a {type(label).__name__}: a math label is a string or a number")
    if isinstance(label, float):
        if not math.isfinite(label):
            raise LabelError(f"label {label!r} is not a finite number")
        return str(int(label)) if label.is_integer() and abs(label) < 1e15 else repr(label)
    text = str(label).strip()
    if has_box(text):
        boxed = last_boxed(text)
        if boxed is None:
            raise LabelError(f"label {text[:200]!r} has a \\boxed{{}} that does not close")
        text = boxed.strip()
    if not text:
        raise LabelError(f"label {label!r:.200} is empty")
    return text
