"""LaTeX and plain-text answers, brought to one spelling. String to string, no evaluation."""

from __future__ import annotations

import re
import unicodedata

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUPERSCRIPT_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_VULGAR = re.compile("(?<=[0-9])(?=[¼-¾⅐-⅞])")
_UNICODE = {
    **dict.fromkeys("−‐‑‒–—﹣-", "-"),
    **dict.fromkeys("​‌‍\u200e\u200f﻿", ""),
    "×": r"\times ", "÷": "/", "⁄": "/", "∕": "/", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "°": r"^\circ",
    "π": r"\pi ", "√": r"\sqrt ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∅": r"\emptyset ", "′": "'", "’": "'", "，": ",", "；": ";",
}  # fmt: skip
_UNICODE_TABLE = str.maketrans(_UNICODE)

TEXT_COMMANDS = r"text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|hbox|operatorname|rm"
_TEXT = re.compile(rf"\\(?:{TEXT_COMMANDS})\s*\{{([^{{}}]*)\}}")
_SIZES = re.compile(r"\\(?:left|right|bigl|bigr|Bigl|Bigr|biggl|biggr|Biggl|Biggr|bigg|Bigg|big|Big)(?![a-zA-Z])\.?")
_THIN_SPACES = re.compile(r"(?<!\\)\\[!,;:]")
_WIDE_SPACES = re.compile(r"\\(?:quad|qquad|enspace|displaystyle|textstyle|limits)(?![a-zA-Z])|(?<!\\)\\ |~")
_FRAC_NAME = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_FRAC_BARE = re.compile(r"\\frac\s*(?:(\d)\s*(\d|[a-zA-Z])|(\d|[a-zA-Z])\s*\{|(\{(?:[^{}]|\{[^{}]*\})*\})\s*(\w))")
_PLAIN_ROOT = re.compile(r"(?<![\\a-zA-Z])sqrt ?\(([^()]*)\)")
_PLAIN_NAME = re.compile(r"(?<![\\a-zA-Z])(?:(pi)|inf(?:inity|ty)?)(?![a-zA-Z])")
_SQRT_BARE = re.compile(r"\\sqrt\s*(\d+|[a-zA-Z]|\\pi)")
_CARET = re.compile(r"\^\s*\{\s*(-?\w)\s*\}")
_OPERATOR_SPACES = re.compile(r"\s*([-+*/=^<>_])\s*")
_PUNCTUATION_SPACES = re.compile(r"\s*([,;(\[{|])\s*|\s+(?=[)\]}])")
_SYNONYMS = (
    (r"\lbrace", r"\{"), (r"\rbrace", r"\}"), (r"\leq", r"\le"), (r"\geq", r"\ge"), (r"\neq", r"\ne"),
    (r"\cdot", r"\times"), (r"\varnothing", r"\emptyset"), (r"\degree", r"^\circ"),
    (r"^{\circ}", r"^\circ"), (r"\%", "%"), (r"\$", "$"), ("{,}", ","), (r"\{\}", r"\emptyset"),
    (r"+\infty", r"\infty"),
)  # fmt: skip
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"), ('"', '"'))


def unwrap(text: str) -> str:
    """Strip whitespace, a final full stop, and what an answer is wrapped in: `$...$`, `\\(...\\)`, `**...**`."""
    while True:
        before = text
        text = text.strip().rstrip(".。") if not text.endswith("...") else text.strip()
        for left, right in _WRAPPERS:
            if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right):
                inner = text[len(left) : -len(right)]
                if left not in inner:
                    text = inner
        if text == before:
            return text


def normalize(text: str) -> str:
    """One spelling for an answer.

    Unicode mathematics and plain `sqrt(2)`, `pi` and `inf` become LaTeX, `\\dfrac` and `\\frac12` become
    `\\frac{1}{2}`, `\\left`, `\\right` and LaTeX spacing go, `\\text{}` is unwrapped, dollar signs go, and single
    spaces stay only between words and numbers (a mixed number needs its space). The length of the work is linear in the
    length of the text.

    Args:
        text: The content of a box, or a label.

    Returns:
        The normalised answer, `""` if nothing is left.
    """
    text = unwrap(text)
    if not text.isascii():
        text = _VULGAR.sub(" ", text)
        text = _SUPERSCRIPT_RUN.sub(lambda match: "^{" + match.group().translate(_SUPERSCRIPTS) + "}", text)
        text = unicodedata.normalize("NFKC", text.translate(_UNICODE_TABLE)).translate(_UNICODE_TABLE)
    if "sqrt" in text or "pi" in text or "inf" in text:  # written as in a program
        text = _PLAIN_ROOT.sub(r"\\sqrt{\1}", text)
        text = _PLAIN_NAME.sub(lambda match: r"\pi " if match[1] else r"\infty ", text)
    if "\\" in text or "$" in text or "{" in text or "~" in text:
        text = _latex(text)
    text = _OPERATOR_SPACES.sub(r"\1", " ".join(text.split()))
    text = _PUNCTUATION_SPACES.sub(r"\1", text)
    return _CARET.sub(r"^\1", text).strip(" :") if "^" in text else text.strip(" :")


def _latex(text: str) -> str:
    text = _SIZES.sub("", _THIN_SPACES.sub("", text))
    text = _WIDE_SPACES.sub(" ", text)
    for old, new in _SYNONYMS:
        if old in text:
            text = re.sub(re.escape(old) + r"(?![a-zA-Z])", new.replace("\\", r"\\"), text)
    for _ in range(3):  # nested \text{\textbf{...}}
        text, count = _TEXT.subn(r" \1 ", text)
        if not count:
            break
    text = text.replace("$", "")
    if r"\frac" in text or "frac" in text:
        text = _FRAC_NAME.sub(r"\\frac", text)
        text = _FRAC_BARE.sub(_braced_fraction, text)
    return _SQRT_BARE.sub(r"\\sqrt{\1}", text) if r"\sqrt" in text else text


def _braced_fraction(match: re.Match[str]) -> str:
    numerator, denominator, before_brace, braced, after_brace = match.groups()
    if before_brace is not None:
        return rf"\frac{{{before_brace}}}{{"
    if braced is not None:
        return rf"\frac{braced}{{{after_brace}}}"
    return rf"\frac{{{numerator}}}{{{denominator}}}"
