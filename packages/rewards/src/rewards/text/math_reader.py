"""Ordinary LaTeX expressions into sympy, in well under a millisecond. Anything else is left to math-verify's parser.

math-verify's grammar reads far more, and takes 10 to 100 ms on a form it has not met before.
"""

from __future__ import annotations

import re
from typing import Any

import sympy

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?|\.\d+)|(\\[a-zA-Z]+)|([a-zA-Z])|([-+*/^(){}\[\]]))")
_MULTIPLY = frozenset({"*", "\\times", "\\cdot"})
_CONSTANTS = {"\\pi": sympy.pi, "e": sympy.E, "i": sympy.I}
_FUNCTIONS = {
    "\\sin": sympy.sin,
    "\\cos": sympy.cos,
    "\\tan": sympy.tan,
    "\\ln": sympy.log,
    "\\exp": sympy.exp,
}
_GREEK = re.compile(r"\\(?:alpha|beta|gamma|delta|theta|lambda|mu|sigma|phi|omega|tau|rho)")


class _Unread(Exception):
    """The expression has something that this reader does not know."""


def read(text: str) -> Any:
    """The sympy expression of `text`, or `None` for what is no sum, product, quotient, power, root or function.

    Decimals are exact rationals; a letter is a symbol, except e and i; `ab` is a product. `1/2x`, which people read in
    two ways, is not read.
    """
    tokens: list[str] = []
    position = 0
    text = text.rstrip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        tokens.append(match.group().strip())
        position = match.end()
    reader = _Reader(tokens)
    try:
        value = reader.sum()
    except (_Unread, IndexError, ZeroDivisionError):
        return None
    return value if reader.position == len(tokens) and isinstance(value, sympy.Expr) else None


class _Reader:
    """Recursive descent over the tokens; raises where it does not know what to do."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.position = 0

    def peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self) -> str:
        self.position += 1
        return self.tokens[self.position - 1]

    def expect(self, token: str) -> None:
        if self.peek() != token:
            raise _Unread
        self.position += 1

    def sum(self) -> Any:
        total = self.product()
        while self.peek() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            total = total + sign * self.product()
        return total

    def product(self) -> Any:
        if self.peek() in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            return sign * self.product()
        value, divided = self.power(), False
        while True:
            token = self.peek()
            if token in _MULTIPLY:
                self.take()
                value = value * self.power()
            elif token == "/":
                self.take()
                value, divided = value / self.power(), True
            elif not token or token in "+-)}]":
                return value
            elif divided or token[0].isdigit() or token[0] == ".":
                raise _Unread
            else:
                value = value * self.power()

    def power(self) -> Any:
        base = self.atom()
        if self.peek() != "^":
            return base
        self.take()
        exponent = self.group()
        if self.peek() == "^":
            raise _Unread
        return base**exponent

    def group(self) -> Any:
        """An argument of LaTeX: `{...}` or one token, of a number its first digit."""
        if self.peek() == "{":
            return self.enclosed("{", "}")
        token = self.take()
        if token.isdigit() and len(token) == 1:
            return sympy.Integer(token)
        if (len(token) == 1 and token.isalpha()) or token in _CONSTANTS:
            return _CONSTANTS.get(token) or sympy.Symbol(token)
        raise _Unread

    def enclosed(self, left: str, right: str) -> Any:
        self.expect(left)
        value = self.sum()
        self.expect(right)
        return value

    def atom(self) -> Any:
        token = self.peek()
        if token == "(":
            return self.enclosed("(", ")")
        if token == "[":
            return self.enclosed("[", "]")
        if token == "{":
            return self.enclosed("{", "}")
        token = self.take()
        if token == "\\frac":
            numerator, denominator = self.enclosed("{", "}"), self.enclosed("{", "}")
            return numerator / denominator
        if token == "\\sqrt":
            index = self.enclosed("[", "]") if self.peek() == "[" else sympy.Integer(2)
            return self.enclosed("{", "}") ** (1 / index)
        if token in _FUNCTIONS:
            if self.peek() not in ("(", "{"):
                raise _Unread  # where the argument of \sin 2x ends is a matter of taste
            return _FUNCTIONS[token](self.enclosed(self.peek(), ")" if self.peek() == "(" else "}"))
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        if _GREEK.fullmatch(token) or (len(token) == 1 and token.isalpha()):
            return sympy.Symbol(token)
        if token[0].isdigit() or token[0] == ".":
            return sympy.Rational(token)
        raise _Unread
