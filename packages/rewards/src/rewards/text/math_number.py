"""Plain numbers in an answer, read exactly: integers, decimals, fractions, mixed numbers, percent, units."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

_PLAIN = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?)(?:
        (?:(?P<whole>\d+)[ ]?)?\\frac\{{(?P<num>[-+]?(?:{_PLAIN}))\}}\{{(?P<den>[-+]?(?:{_PLAIN}))\}}
      | (?:(?P<whole2>\d+)[ ])?(?P<num2>{_PLAIN})/(?P<den2>[-+]?(?:{_PLAIN}))
      | (?P<decimal>{_PLAIN})(?:(?:\\times[ ]?|[*x])10\^(?:\{{(?P<exp>[-+]?\d{{1,3}})\}}|(?P<exp2>-?\d))
                              |[eE](?P<exp3>[-+]?\d{{1,3}}))?
    )(?P<rest>[ ]?%|[ ]?\^\\circ[ ]?[CF]?|[^\d\\+*/^,.=()\[\]{{}}<>|-][^\d\\+*/,=()\[\]{{}}<>|]*
              (?:\^[23]|\^\{{[23]\}})?)?""",
    re.VERBOSE,
)
_SPACED_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\overline\{(\d+)\}")
_MAX_DIGITS = 1000

# The spelling that the others become, then the others. A plural s is taken off before the look-up.
_UNITS = """
cm centimeter centimetre; mm millimeter millimetre; m meter metre; km kilometer kilometre; in inch inches
ft foot feet; yd yard; mi mile; s sec second; min minute; h hr hour; day; week; month; year yr
g gram; kg kilogram; mg milligram; lb pound; oz ounce; L l liter litre; mL ml milliliter millilitre; gallon gal
° degree deg; rad radian; dollar usd; cent; mph; % percent percentage; unit; point pt; person people
N newton; J joule; W watt; V volt; A ampere amp; Hz hz hertz; K kelvin; square sq; cubic cu
"""
_UNIT_OF = {word: words[0] for words in map(str.split, re.split("[;\n]", _UNITS.strip())) for word in words}
_UNIT_WORD = re.compile(r"[a-zA-Z]+")


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value with what stood beside it.

    Attributes:
        value: The number as written; `50%` is 50.
        percent: It had a percent sign.
        unit: Its unit in one spelling, `""` for none.
        decimals: Digits after the decimal point, 0 for integers and fractions.
    """

    value: Fraction
    percent: bool = False
    unit: str = ""
    decimals: int = 0


def parse_number(text: str, any_unit: bool = False) -> Number | None:
    """Read a normalised answer that is one number.

    Args:
        text: Output of `math_normalize.normalize`.
        any_unit: Take any words after the number for its unit, as where they came from `\\text{}`.

    Returns:
        The number, or `None` if the text is anything else, has over 1000 digits or divides by zero.
    """
    if not text or len(text) > _MAX_DIGITS:
        return None
    if " " in text and _SPACED_THOUSANDS.fullmatch(text):
        text = text.replace(" ", "")
    if "overline" in text:
        text = _REPEATING.sub(_repeating, text)
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    unit = _unit(match["rest"] or "", any_unit)
    if unit is None:
        return None
    decimals = 0
    if match["decimal"] is not None:
        value = _fraction(match["decimal"])
        decimals = len(match["decimal"].partition(".")[2])
        exponent = match["exp"] or match["exp2"] or match["exp3"]
        if exponent:
            value, decimals = value * Fraction(10) ** int(exponent), 0
    else:
        denominator = _fraction(match["den"] or match["den2"])
        if denominator == 0:
            return None
        value = _fraction(match["num"] or match["num2"]) / denominator
        whole = match["whole"] or match["whole2"]
        if whole:
            value += int(whole)
    if match["sign"] == "-":
        value = -value
    return Number(value, unit == "%", "" if unit == "%" else unit, decimals)


def same_number(left: Number, right: Number) -> bool:
    """Whether two numbers are one answer.

    Values are compared exactly, so 2/4 is 1/2. A decimal with at least six places also equals the number it is the
    correct rounding of (0.333333 for 1/3). A percent sign counts as a unit (50% is 50) and as a hundredth (50% is
    0.5). Units must agree where both answers have one.
    """
    if left.unit and right.unit and left.unit != right.unit:
        return False
    if left.percent != right.percent:
        ratio, plain = (left, right) if left.percent else (right, left)
        return plain.value in (ratio.value, ratio.value / 100)
    if left.value == right.value:
        return True
    rough, fine = (left, right) if left.decimals < right.decimals or right.decimals == 0 else (right, left)
    if rough.decimals == 0:
        rough, fine = fine, rough
    return rough.decimals >= 6 and round(fine.value, rough.decimals) == rough.value


def is_unit(word: str) -> bool:
    """Whether a word of a normalised answer is the name of a unit."""
    return _unit(" " + word, any_unit=False) is not None


def _repeating(match: re.Match[str]) -> str:
    """`0.1\\overline{6}` as the fraction that it is."""
    whole, fixed, repeated = match.groups()
    head = int(whole + fixed or "0")
    numerator = int(whole + fixed + repeated) - head
    return f"{numerator}/{(10 ** len(repeated) - 1) * 10 ** len(fixed)}"


def _fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", "").rstrip(".") or "0")


def _unit(rest: str, any_unit: bool) -> str | None:
    """The unit in one spelling; `None` if these words are no unit. `5m` is a product, `5 m` has a unit."""
    touching = not rest.startswith(" ")
    rest = rest.strip(" .")
    if not rest or rest == "%":
        return rest
    if rest.startswith(r"^\circ"):
        return "°" + rest[6:].strip()
    rest = rest.replace("{", "").replace("}", "").replace("^2", " squared").replace("^3", " cubed")
    parts = []
    words = _UNIT_WORD.findall(rest)
    if not words:
        return None
    for word in words:
        lower = word.lower()
        unit = _UNIT_OF.get(lower) or _UNIT_OF.get(lower.rstrip("s")) or (lower if any_unit else None)
        if lower in ("squared", "cubed"):
            unit = "square" if lower == "squared" else "cubic"
        elif lower in ("per", "of", "the"):
            unit = "per" if lower == "per" else ""
        if unit is None or (touching and len(rest) == 1 and not any_unit):
            return None
        parts.append(unit)
    if "square" in parts or "cubic" in parts:
        parts.sort()  # "square cm" and "cm^2"
    if "unit" in parts:
        parts.remove("unit")
    return " ".join(part for part in parts if part)
