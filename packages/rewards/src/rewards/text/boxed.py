"""The last `\\boxed{}` of a text."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_BRACE = re.compile(r"[{}]|\\.", re.DOTALL)
_MAX_ANSWER = 20_000


def has_box(text: str) -> bool:
    """Whether the text has a box at all, closed or not."""
    return "\\boxed" in text or "\\fbox" in text


def last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{...}`, or of the last `\\fbox{...}` where there is none, with nested braces.

    Escaped braces (`\\{`) do not count as nesting, so a set `\\boxed{\\{1,2\\}}` is read whole. `\\boxed 5` is read as
    `5`, up to the next space or `$`.

    Args:
        text: Any text; the scan is linear in its length.

    Returns:
        The content, or `None` when there is no box, its brace never closes, or it is longer than 20,000 characters.
    """
    start = text.rfind("\\boxed")
    if start < 0:
        start = text.rfind("\\fbox")
    if start < 0:
        return None
    match = _BOX.match(text, start)
    if match is None:
        return None
    begin = match.end()
    if not text.startswith("{", begin):
        word = re.match(r"[^\s$]{1,200}", text[begin : begin + 201])
        return word.group().rstrip(".,") if word else None
    depth = 0
    for token in _BRACE.finditer(text, begin, begin + _MAX_ANSWER):
        if token.group() == "{":
            depth += 1
        elif token.group() == "}":
            depth -= 1
            if depth == 0:
                return text[begin + 1 : token.start()]
    return None
