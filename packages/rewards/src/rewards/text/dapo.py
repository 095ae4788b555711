"""`dapo`: the last `Answer:` line against the label."""

from __future__ import annotations

import re
from typing import Any

from rewards.text.boxed import has_box, last_boxed
from rewards.text.math import label_text
from rewards.text.math_equivalence import equivalent

INVALID = "[INVALID]"
_TAIL = 300
_STRICT_TAIL = 100
_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


def grade(response: str, label: Any, *, strict_box: bool = False) -> dict[str, Any]:
    """Score of DAPO (Yu et al. 2025, https://arxiv.org/abs/2503.14476): 1 if right, -1 if not.

    Only the last 300 characters are read, and of them the last `Answer: ...` line. The answer is compared with the
    label by normalisation and exact numbers, without algebra: labels of DAPO's data are integers.

    Args:
        response: What the model wrote.
        label: The reference answer; an int is as good as a string.
        strict_box: Read the last `\\boxed{}` of the last 100 characters in place of the `Answer:` line, and compare
            it with the label character by character.

    Returns:
        `{"score": 1.0 or -1.0, "acc": bool, "pred": the answer read, "[INVALID]" if there is none}`. Train on
        `score` (`--reward-key score`).

    Raises:
        LabelError: The label is no answer.
    """
    reference = label_text(label)
    if strict_box:
        prediction = last_boxed(response[-_STRICT_TAIL:])
        correct = prediction is not None and prediction.strip() == reference
    else:
        lines = _ANSWER.findall(response[-_TAIL:])
        prediction = lines[-1].strip() if lines else None
        correct = prediction is not None and equivalent(_unboxed(prediction), reference, symbolic=False)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": INVALID if prediction is None else prediction}


def _unboxed(answer: str) -> str:
    return (last_boxed(answer) or answer) if has_box(answer) else answer
