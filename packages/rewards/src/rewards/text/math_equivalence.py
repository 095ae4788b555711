"""Whether two mathematical answers are the same: spelling, then exact numbers, then structure, then algebra."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from rewards.text.math_arithmetic import evaluate, is_arithmetic
from rewards.text.math_normalize import TEXT_COMMANDS, normalize, unwrap
from rewards.text.math_number import Number, is_unit, parse_number, same_number
from rewards.text.math_symbolic import symbolically_equal

_MAX_CHARACTERS = 1000
_PLAIN_INTEGER = re.compile(r"-?[1-9]\d{0,17}|0")
_LONG_INTEGER = re.compile(r"([-+]?)0*(\d+)")
_TRAILING_TEXT = re.compile(rf"\\(?:{TEXT_COMMANDS})\s*\{{([^{{}}]*)\}}\s*(\^\{{?[23]\}}?)?$")
_TRAILING_UNIT = re.compile(r" ([a-zA-Z]+)(?:\^[23])?$")
_NAMED = re.compile(
    r"((?:m ?)?(?:\\angle ?)?\\?[a-zA-Z]+(?:_(?:\w|\{\w+\}))?(?:\([a-zA-Z]\))?)(?:=| ?\\in(?![a-zA-Z]) ?)(?=.)"
)
_CONJUNCTION = re.compile(r" ?,? ?\b(?:and|or)\b ?", re.IGNORECASE)
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-z]*\}")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_NAME = re.compile(r"[a-zA-Z]+")
_NO_CONSTANT = re.compile(r"[=<>&#@~?;\"'`]")
_BEYOND_ARITHMETIC = re.compile(r"[\\!|:%\[\]]")
_MATHEMATICS = re.compile(r"[0-9\\]")
_BRACKET = re.compile(r"\\?[()\[\]{}]|[,;]|\\cup(?![a-zA-Z])")
_BRACES = re.compile(r"(?<!\\)[{}]")
_FUNCTIONS = re.compile(
    r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp|sqrt|lim|max|min|gcd|lcm|det|mod", re.IGNORECASE
)

Pairs = list[tuple[str, str]]


def equivalent(answer: str, label: str, symbolic: bool = True) -> bool:
    """Whether an answer equals the label.

    Args:
        answer: The content of the box, or another bare answer.
        label: The reference, as LaTeX or plain text.
        symbolic: Ask math-verify where spelling, numbers and structure do not decide.
    """
    if answer == label:
        return True
    if _PLAIN_INTEGER.fullmatch(answer) and _PLAIN_INTEGER.fullmatch(label):
        return False
    return _equivalent(answer, label, symbolic)


@lru_cache(maxsize=8192)
def _equivalent(answer: str, label: str, symbolic: bool) -> bool:
    if answer.strip() == label.strip() != "":
        return True
    if len(answer) > _MAX_CHARACTERS or len(label) > _MAX_CHARACTERS:
        return _same_long_integer(unwrap(answer), unwrap(label))
    left, right = _parse(answer), _parse(label)
    if not left.text or not right.text:
        return unwrap(answer) == unwrap(label) != ""
    decision = _decide(left, right)
    if isinstance(decision, bool):
        return decision
    return symbolic and symbolically_equal(tuple(decision))


def _same_long_integer(left: str, right: str) -> bool:
    """Integers of any length, compared as digits: no conversion of a hostile ten-thousand-digit number."""
    first, second = (_LONG_INTEGER.fullmatch(text.replace(",", "")) for text in (left, right))
    return bool(first and second and first[2] == second[2] and (first[1] == "-") == (second[1] == "-"))


@dataclass(frozen=True, slots=True)
class _Answer:
    """A normalised answer: its name (the `x` of `x=5`), the text after it, and the number it is, if it is one."""

    text: str
    name: str = ""
    number: Number | None = None

    @property
    def compact(self) -> str:
        return self.text.replace(" ", "")


def _parse(raw: str) -> _Answer:
    raw = unwrap(raw)
    text, unit = _without_braces(normalize(raw)), ""
    trailing = _TRAILING_TEXT.search(raw)
    if trailing:
        head = normalize(raw[: trailing.start()].rstrip("\\ "))  # `5\\ \\text{cm}`: the space is the unit's
        unit = normalize(trailing[1] + (trailing[2] or ""))
        if _MATHEMATICS.search(head) and unit.lower() not in ("and", "or"):
            text = head
        else:
            unit = ""
    name = ""
    named = _NAMED.match(text)
    if named and not any(sign in text[named.end() :] for sign in "=<>"):
        name, text = named[1], text[named.end() :]
    number = parse_number(f"{text} {unit}" if unit else text, any_unit=bool(unit))
    if number is None:
        plain = _TRAILING_UNIT.search(text)
        if plain and is_unit(plain[1]) and _MATHEMATICS.search(text[: plain.start()]):
            text = text[: plain.start()]
        text = _CONJUNCTION.sub(",", text)
        inner = _bracketed(text)
        if inner is not None and inner[0] == "(" and inner[1] == ")" and len(inner[2]) == 1:
            text = inner[2][0]
            number = parse_number(text)
    return _Answer(text, name, number)


def _decide(left: _Answer, right: _Answer) -> bool | Pairs:
    """True or False where that is certain, else the pairs that algebra has to find equal."""
    if left.name and right.name and left.name != right.name:
        return [(f"{left.name}={left.text}", f"{right.name}={right.text}")]
    if left.compact == right.compact:
        return True
    if left.number and right.number:
        return same_number(left.number, right.number)
    if not (left.number or right.number):
        first, second = _parts(left.text), _parts(right.text)
        if first and second:
            return _decide_parts(first, second)
        if first or second:
            return False
    if _words(left.text) or _words(right.text):
        return _letters(left.text) == _letters(right.text) != ""
    for number, other in ((left.number, right.text), (right.number, left.text)):
        if number is not None and (decision := _decide_against_number(number, other)) is not None:
            return decision
    return [(left.text, right.text)]


def _decide_against_number(number: Number, other: str) -> bool | None:
    """Whether a text that is no plain number has this value; `None` where only algebra can tell.

    A policy that has not learnt yet writes much that is no answer. It must not reach the algebra, which is slow.
    """
    if is_arithmetic(other):
        value = evaluate(other)
        return value is not None and same_number(number, Number(value))
    parts = _parts(other)
    if parts and len(parts[2]) > 1:
        return False
    names = _NAME.findall(_COMMAND.sub(" ", other))
    if not other.isascii() or _NO_CONSTANT.search(other) or not (names or _BEYOND_ARITHMETIC.search(other)):
        return False
    return None if all(name in ("e", "i", "pi") or _FUNCTIONS.fullmatch(name) for name in names) else False


def _decide_parts(left: tuple[str, str, list[str]], right: tuple[str, str, list[str]]) -> bool | Pairs:
    """Tuples and intervals part by part with the same brackets; sets, unions and bare lists in any order."""
    (open_left, close_left, left_parts), (open_right, close_right, right_parts) = left, right
    kinds = {open_left + close_left, open_right + close_right}
    if len(left_parts) != len(right_parts) or (len(kinds) > 1 and kinds not in ({"", "{}"}, {"", "()"})):
        return False
    firsts, seconds = [_parse(part) for part in left_parts], [_parse(part) for part in right_parts]
    if kinds <= {"", "{}"} or kinds == {"∪"}:
        return _decide_unordered(firsts, seconds)
    pairs: Pairs = []
    for first, second in zip(firsts, seconds, strict=True):
        decision = _decide(first, second)
        if decision is False:
            return False
        if isinstance(decision, list):
            pairs += decision
    return pairs or True


def _decide_unordered(left: list[_Answer], right: list[_Answer]) -> bool | Pairs:
    open_left: list[_Answer] = []
    for first in left:
        match = next((i for i, second in enumerate(right) if _decide(first, second) is True), None)
        if match is None:
            open_left.append(first)
        else:
            right = right[:match] + right[match + 1 :]
    if not open_left:
        return True
    if any(all(_decide(first, second) is False for second in right) for first in open_left):
        return False
    if len(right) == 1:
        return _decide(open_left[0], right[0])
    return [tuple("\\{" + ",".join(answer.text for answer in side) + "\\}" for side in (open_left, right))]  # type: ignore[list-item]


def _parts(text: str) -> tuple[str, str, list[str]] | None:
    """Brackets and parts of a tuple, interval, set, union or bare list; `None` for anything with one part."""
    inner = _bracketed(text)
    if inner is not None and (len(inner[2]) > 1 or inner[0] == "{"):
        return inner
    parts, separator = _split(text)
    if len(parts) < 2:
        if text.count("\\pm") != 1:
            return None
        plus, minus = (re.sub(r"\\pm ?", sign, text) for sign in "+-")
        return "", "", [plus.removeprefix("+"), minus]
    return ("∪", "", parts) if separator == "\\cup" else ("", "", parts)


def _without_braces(text: str) -> str:
    """`{5}` is 5; `{1,2}` is what `\\{1,2\\}` is."""
    while text.startswith("{") and text.endswith("}"):
        depths = list(accumulate((token == "{") - (token == "}") for token in _BRACES.findall(text)))
        if min(depths[:-1]) < 1 or depths[-1] != 0:
            break
        inner = text[1:-1].strip()
        if len(_split(inner)[0]) > 1:
            return "\\{" + inner + "\\}"
        text = inner
    return text


def _bracketed(text: str) -> tuple[str, str, list[str]] | None:
    """`("[", ")", parts)` where one pair of brackets encloses the whole text."""
    size = 2 if text.startswith("\\{") else 1
    if len(text) < 2 * size or text[size - 1] not in "([{" or text[-1] not in ")]}" or (text[0] == "{"):
        return None
    depth = 0
    for token in _BRACKET.finditer(text):
        character = token.group()[-1]
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth == 0 and token.end() < len(text):
                return None
    if depth != 0:
        return None
    parts, separator = _split(text[size:-size])
    return None if separator == "\\cup" else (text[size - 1], text[-1], parts)


def _split(text: str) -> tuple[list[str], str]:
    """Split at top-level unions, or else at top-level commas and semicolons."""
    cuts: dict[str, list[tuple[int, int]]] = {"\\cup": [], ",": []}
    depth = 0
    for token in _BRACKET.finditer(text):
        found = token.group()
        if found == "\\cup":
            if depth == 0:
                cuts["\\cup"].append(token.span())
        elif found in ",;":
            if depth == 0:
                cuts[","].append(token.span())
        else:
            depth += 1 if found[-1] in "([{" else -1
    separator = "\\cup" if cuts["\\cup"] else ","
    starts = [0, *(end for _, end in cuts[separator])]
    ends = [*(start for start, _ in cuts[separator]), len(text)]
    return [text[start:end].strip() for start, end in zip(starts, ends, strict=True)], separator


def _words(text: str) -> bool:
    """Whether the text has words of a language: three letters or more that are no function's name."""
    return any(not _FUNCTIONS.fullmatch(word) for word in _WORD.findall(_ENVIRONMENT.sub("", text)))


def _letters(text: str) -> str:
    return "".join(character for character in text.casefold() if character.isalnum())
