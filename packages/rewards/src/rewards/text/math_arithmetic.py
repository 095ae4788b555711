"""Arithmetic in digits, `2+3` or `2^10/4`, evaluated exactly and within bounds; no names, no LaTeX."""

from __future__ import annotations

import re
from fractions import Fraction

_ONLY = re.compile(r"[\d+\-*/^().{} ]+")
_TOKEN = re.compile(r" *(\d+(?:\.\d+)?|\.\d+|[-+*/^(){}])")
_MAX_CHARACTERS = 100
_MAX_BITS = 20_000


class _Malformed(Exception):
    """The text is no arithmetic, or its value is too large to be anybody's answer."""


def is_arithmetic(text: str) -> bool:
    """Whether the text has nothing but digits, operators and brackets, so that `evaluate` has the last word on it."""
    return _ONLY.fullmatch(text) is not None


def evaluate(text: str) -> Fraction | None:
    """The exact value, or `None` where the text is malformed, divides by zero or is out of bounds.

    Args:
        text: A text that `is_arithmetic`. A power needs an integer exponent; `2(3)` is a product.
    """
    if len(text) > _MAX_CHARACTERS:
        return None
    tokens, position = [], 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        tokens.append(match[1])
        position = match.end()
    try:
        value = _sum(tokens)
    except (_Malformed, IndexError, ZeroDivisionError):
        return None
    return None if tokens else value


def _sum(tokens: list[str]) -> Fraction:
    total = _product(tokens)
    while tokens and tokens[0] in "+-":
        total = total + _product(tokens) if tokens.pop(0) == "+" else total - _product(tokens)
    return total


def _product(tokens: list[str]) -> Fraction:
    if tokens[0] in "+-":
        return -_product(tokens) if tokens.pop(0) == "-" else _product(tokens)
    value = _power(tokens)
    while tokens and tokens[0] in "*/({":
        if tokens[0] == "*":
            tokens.pop(0)
            value = value * _power(tokens)
        elif tokens[0] == "/":
            tokens.pop(0)
            value = value / _power(tokens)
        else:
            value = value * _power(tokens)
        _bounded(value)
    return value


def _power(tokens: list[str]) -> Fraction:
    base = _atom(tokens)
    if not tokens or tokens[0] != "^":
        return base
    tokens.pop(0)
    sign = -1 if tokens[0] == "-" and tokens.pop(0) else 1
    exponent = sign * _atom(tokens)
    if exponent.denominator != 1 or (tokens and tokens[0] == "^"):
        raise _Malformed
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * size > _MAX_BITS:
        raise _Malformed
    return base**exponent.numerator


def _atom(tokens: list[str]) -> Fraction:
    token = tokens.pop(0)
    if token in "({":
        value = _sum(tokens)
        if tokens.pop(0) != {"(": ")", "{": "}"}[token]:
            raise _Malformed
        return value
    if not token[-1].isdigit():
        raise _Malformed
    return Fraction(token)


def _bounded(value: Fraction) -> None:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_BITS:
        raise _Malformed
