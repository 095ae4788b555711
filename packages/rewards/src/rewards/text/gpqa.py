"""`gpqa`: multiple choice, by letter or by the text of the choice."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from rewards.request import LabelError

_DEFAULT_LETTERS = string.ascii_uppercase[:10]
_LETTER = (
    r"[\s*_$]{0,8}(?:\\(?:text|mathrm|boxed)\{)?[\s*_$]{0,8}\(?([A-Z](?![A-Za-z'’])|[a-z](?=\s{0,4}[).]?\s{0,4}$))"
)
_NAMED = re.compile(rf"(?i:answer|option|choice)\s{{0,8}}(?i:is)?\s{{0,8}}:?{_LETTER}", re.MULTILINE)
_BOXED = re.compile(rf"\\boxed\{{{_LETTER}", re.MULTILINE)
_CORRECT = re.compile(r"\b([A-Z])\)?\s{1,8}is\s{1,8}(?:the\s{1,8})?correct")
_STANDALONE = re.compile(r"(?<![A-Za-z'’])(?:[A-HJ-Z]|I(?!\s+[a-z]))(?![A-Za-z'’])")  # "I think" names no choice
_TAIL = 20_000


def grade(response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """1.0 if the response picks the right choice, else 0.0 (GPQA: https://arxiv.org/abs/2311.12022).

    The letter is read from the text after the last `</think>`: the last of `answer: C`, `the answer is (C)`,
    `option C`, `\\boxed{C}`, `C is correct`; else the last capital letter that stands alone. Letters that name no
    choice are passed over. With no letter at all, the response is right if it contains the text of the right choice
    and of no other choice.

    Args:
        response: What the model wrote; its last 20,000 characters are read.
        label: The right letter, the text of the right choice, or its index (an int, from 0).
        metadata: `choices` (a list, or a mapping from letters), `valid_letters` and `correct_letter`, all optional.

    Raises:
        LabelError: Label and metadata together do not say which choice is right.
    """
    metadata = metadata or {}
    choices = metadata.get("choices")
    choices = list(choices.values()) if isinstance(choices, Mapping) else list(choices or [])
    letters = _letters(metadata, choices)
    correct, text = _correct(label, metadata.get("correct_letter"), letters, choices)
    tail = response[-_TAIL:].rpartition("</think>")[2]
    letter = _chosen_letter(tail, letters)
    if letter is not None and correct is not None:
        return float(letter == correct)
    if text is None:
        return 0.0
    answer = _words(tail)
    others = [other for choice in choices if (other := _words(str(choice))) and other not in text]
    return float(text in answer and not any(f" {other} " in f" {answer} " for other in others))


def _letters(metadata: Mapping[str, Any], choices: Sequence[Any]) -> list[str]:
    given = metadata.get("valid_letters")
    if given:
        return [str(letter).strip().upper() for letter in given]
    return list(string.ascii_uppercase[: len(choices)] if choices else _DEFAULT_LETTERS)


def _correct(label: Any, given: Any, letters: list[str], choices: list[Any]) -> tuple[str | None, str | None]:
    """The right letter and the right text, as far as they are known."""
    letter = given.strip().upper() if isinstance(given, str) and given.strip() else None
    text: str | None = None
    if isinstance(label, int) and not isinstance(label, bool):
        if not 0 <= label < len(letters):
            raise LabelError(f"label {label} is no index of the {len(letters)} choices {', '.join(letters)}")
        letter = letter or letters[label]
    elif isinstance(label, str):
        stripped = label.strip().strip("().").upper()
        if len(stripped) == 1 and stripped in letters:
            letter = letter or stripped
        else:
            text = _words(label) if len(stripped) != 1 or not stripped.isalpha() else None
            normalized = [_words(str(choice)) for choice in choices]
            if letter is None and text in normalized:
                letter = letters[normalized.index(text)]
    if text is None and letter in letters and letters.index(letter) < len(choices):
        text = _words(str(choices[letters.index(letter)]))
    if letter is None and not text:
        raise LabelError(f"label {label!r:.200} is no letter of {', '.join(letters)}, no index, and no text")
    return letter, text or None


def _chosen_letter(text: str, letters: list[str]) -> str | None:
    named = [
        (match.start(), match[1].upper())
        for pattern in (_NAMED, _BOXED, _CORRECT)
        for match in pattern.finditer(text)
        if match[1].upper() in letters
    ]
    if named:
        return max(named)[1]
    return next((letter for letter in reversed(_STANDALONE.findall(text)) if letter in letters), None)


def _words(text: str) -> str:
    return " ".join(re.sub(r"[^\w.+-]+", " ", text.casefold()).split())
