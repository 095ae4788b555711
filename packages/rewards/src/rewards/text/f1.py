"""`f1`: word overlap of SQuAD."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

from rewards.request import LabelError

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = frozenset({"yes", "no", "noanswer"})
_MAX_CHARACTERS = 100_000


def grade(response: str, label: Any) -> float:
    """F1 of the words that response and label share (Rajpurkar et al. 2016, https://arxiv.org/abs/1606.05250).

    Both are lower-cased and lose punctuation and the articles a, an, the; F1 = 2PR/(P+R) over the two bags of words.
    Answers "yes", "no" and "noanswer" are right or wrong as a whole, as in HotpotQA. Two texts that are empty after
    normalisation are equal if they were equal before. Of a response over 100,000 characters the first 100,000 count.

    Args:
        response: What the model wrote; usually a short answer (`boxed_f1` grades the box).
        label: The reference, or a list of references of which the best counts.

    Returns:
        F1 in [0, 1].

    Raises:
        LabelError: The label is neither a string or number nor a list of them.
    """
    references = label if isinstance(label, list | tuple) else [label]
    if not references or any(
        isinstance(entry, bool) or not isinstance(entry, str | int | float) for entry in references
    ):
        raise LabelError(f"label {label!r:.200} is no string, number or list of them")
    return max(_f1(response[:_MAX_CHARACTERS], str(entry)) for entry in references)


def normalize(text: str) -> str:
    """Lower case, without punctuation, articles and extra spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _f1(response: str, reference: str) -> float:
    left, right = normalize(response), normalize(reference)
    if not left or not right:
        return float(left == right and response.strip() == reference.strip() != "")
    if left in _CLOSED or right in _CLOSED:
        return float(left == right)
    predicted, expected = left.split(), right.split()
    shared = sum((Counter(predicted) & Counter(expected)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(expected)
    return 2 * precision * recall / (precision + recall)
