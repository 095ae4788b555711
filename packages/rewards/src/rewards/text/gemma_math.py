"""`gemma_math`: the boxed answer after Gemma's thinking channel."""

from __future__ import annotations

from typing import Any

from rewards.text.boxed import last_boxed
from rewards.text.math import label_text
from rewards.text.math_equivalence import equivalent

_END_OF_THINKING = "<channel|>"


def grade(response: str, label: Any) -> float:
    """1.0 if the last `\\boxed{}` after the last `<channel|>` equals the label, else 0.0.

    Gemma 4 closes its thinking with `<channel|>`. A response without that marker is graded whole (thinking may be
    off); unlike `math`, it needs a box. Answers are compared as by `math`.

    Args:
        response: What the model wrote, thinking included.
        label: The reference answer.

    Raises:
        LabelError: The label is no answer.
    """
    reference = label_text(label)
    answer = last_boxed(response.rpartition(_END_OF_THINKING)[2]) or ""
    return float(bool(answer) and equivalent(answer, reference))
