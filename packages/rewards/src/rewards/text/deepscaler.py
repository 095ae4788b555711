"""`deepscaler`: the boxed answer after the reasoning."""

from __future__ import annotations

from typing import Any

from rewards.text.boxed import last_boxed
from rewards.text.math import label_text
from rewards.text.math_equivalence import equivalent

_END_OF_REASONING = ("</think>", "###Response")


def grade(response: str, label: Any) -> float:
    """1.0 if the last `\\boxed{}` after the reasoning equals the label, else 0.0.

    The text after the last `</think>` is graded, or where there is none, after the last `###Response`; a response with
    neither scores 0, so an unfinished reasoning is not rewarded for a box inside it. Answers are compared as by `math`.

    Args:
        response: What the model wrote, reasoning included.
        label: The reference answer, or a list of references of which one has to match.

    Raises:
        LabelError: The label is no answer.
    """
    references = [label_text(entry) for entry in (label if isinstance(label, list) and label else [label])]
    for marker in _END_OF_REASONING:
        if marker in response:
            answer = last_boxed(response.rpartition(marker)[2]) or ""
            return float(bool(answer) and any(equivalent(answer, reference) for reference in references))
    return 0.0
