"""Notations of answers that are rewritten for math-verify, operations left unevaluated, and units of measurement.

Only unambiguous notations are rewritten. Data sets' own scorers read most of them: DAPO's drops spaces, PRM800K's reads
`2 1/3` as a mixed number and knows the signs for roots and infinity.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from workers.evaluators.answers.normal_text import number_and_unit, plain, with_exponents, without_end

_POWER_OF_TEN = re.compile(r"^\s*([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d{1,4})\b")
_GAP = r"(?:\\[,;: ]|~|[ \u00a0\u2009\u202f])"
# Digits after a point, comma or backslash belong to a decimal, a list or a command: not thousands.
_GROUPED = re.compile(rf"(?<![\d.,\\])\d+(?:{_GAP}\d+)+(?![\d/,]|{_GAP}*(?:\\[dtc]?frac|/))")
_THOUSANDS = re.compile(rf"[1-9]\d{{0,2}}(?:{_GAP}\d{{3}})+")
_ONE_FRACTION = re.compile(r"(?<!\d)(\d{0,20})\s?([\u00bc-\u00be\u2150-\u215e])(?!\d)")
_MIXED = re.compile(r"([-+\u2212]?\s*\d{1,9})(?: |\\ )\s*(\d{1,9})/(\d{1,9})")
_REPEATING = re.compile(
    r"(?<![\d.])(\d{1,20})\.(\d{0,20})(?:\\(?:overline|bar|dot)\s*\{(\d{1,20})\}|\\dot\s*(\d))(?!\d|\\(?:overline|bar|dot))"
)
_ROOT = re.compile(r"\u221a\s*(?:(\d+|[A-Za-z])|\(([^()]*)\))")
_SIGNS = {
    **{"\\varnothing": "\\emptyset", "\u221e": "\\infty ", "\u222a": "\\cup ", "\u2229": "\\cap ", "\u2044": "/"},
    **{"\\mathrm{i}": "i", "\\mathrm i": "i", "\\mathrm{e}": "e", "\\mathrm e": "e"},
}
_SIGN = re.compile("|".join(f"{re.escape(sign)}(?![A-Za-z])" for sign in _SIGNS))
_DEGREES = re.compile(r"(?<=[\d})])\s*°(?!\s*[A-Za-z])")
_BEFORE_LETTER = re.compile(r"(?<=\d)\\[,;:!](?=[A-Za-z](?![A-Za-z]))")
_REMARK = re.compile(
    r"\\(?:text[a-z]*|mathrm|mbox|operatorname)\s*\{\s*(?![a-z]*(?:gcd|lcm|mod|det|log)\b)[^{}]*\}(\^\{?-?\d\}?)?"
)
_TENS = re.compile(r"(?:^|(?<=[\d.}])\s*(?:\\times|\\cdot|[\u00d7\u00b7*x])\s*)10\s*\^\s*(?:\{\s*[-+]?\d+\s*\}|\d)")
_SIZES = re.compile(r"\\(?:left|right|[Bb]igg?[lr]?)(?![A-Za-z])\s*")
_DEGREE_SIGN = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|°")
_SIDES = re.compile(r"(?<![\\<>!])=|\\approx|≈|\\Rightarrow|\\implies|\\to\b")
_FRACTION = re.compile(r"\\[dtc]?frac|\\over\b|\\div|[/\u00f7]|(?<=\d)\s*:\s*(?=\d)")
_PLAIN_FRACTION = re.compile(
    r"[-+]?\s*(?:\d+\s*)?(?:\\[dtc]?frac\s*(?:\{\s*\d+\s*\}|\d)\s*(?:\{\s*\d+\s*\}|\d)|\d+/\d+)"
)
_OPERATIONS = {
    "+": re.compile(r"(?<=[\d)}!])\s*(?:[-+\u2212]|\\pm|\\mp)\s*[\w\\({]"),
    "*": re.compile(r"(?:[*\u00d7\u00b7]|\\cdot|\\times)\s*[\w\\({]|[\d)}]\s*\(|\)\s*[\d(]"),
    "^": re.compile(r"\^|\*\*"),
    "!": re.compile(r"!"),
    "root": re.compile(r"\\sqrt|\u221a"),
    "series": re.compile(r"\\(?:sum|prod|i*int|oint|lim|limsup|liminf|bigcup|bigcap)(?![a-z])"),
    "function": re.compile(
        r"\\(?:[dt]?binom|choose|gcd|lcm|det|max|min|sup|inf|log|ln|lg|exp|arc[a-z]+|(?:sin|cos|tan|cot|sec|csc)h?|deg|"
        r"b?mod|pmod|operatorname|lfloor|lceil|lvert|begin)(?![a-z])|\||[A-Za-z]\w*\s*\(|\b(?:choose|mod)\b"
    ),
}
_PREFIXES = {
    **{"giga": "G", "mega": "M", "kilo": "k", "hecto": "h", "deci": "d", "centi": "c", "milli": "m", "tera": "T"},
    **{"micro": "\N{GREEK SMALL LETTER MU}", "nano": "n", "pico": "p", "femto": "f"},
}
_NAMES = {
    **{"meter": "m", "metre": "m", "gram": "g", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h"},
    **{"day": "d", "year": "yr", "joule": "J", "newton": "N", "watt": "W", "pascal": "Pa", "volt": "V", "ampere": "A"},
    **{"amp": "A", "kelvin": "K", "hertz": "Hz", "mole": "mol", "liter": "L", "litre": "L", "l": "L", "ohm": "Ω"},
    **{"coulomb": "C", "farad": "F", "tesla": "T", "weber": "Wb", "henry": "H", "bar": "bar", "electronvolt": "eV"},
    **{"inch": "in", "inches": "in", "foot": "ft", "feet": "ft", "mile": "mi", "pound": "lb", "lbs": "lb"},
    **{"yard": "yd"},
}
_PREFIXED = (
    *("m", "g", "s", "J", "N", "W", "Pa", "V", "A", "K"),
    *("Hz", "mol", "L", "Ω", "C", "F", "T", "Wb", "H", "bar", "eV"),
)
_SYMBOLS = frozenset(
    {f"{prefix}{unit}" for prefix in (*_PREFIXES.values(), "") for unit in _PREFIXED}
    | {"min", "h", "d", "yr", "in", "ft", "mi", "lb", "yd", "°"}
)
_FACTOR = re.compile(r"([^\W\d_]+|°)(?:\^?\{?(-?\d)\}?)?")
# A speed or an acceleration, not a power of milliseconds.
_SPEED = re.compile(r"\bms(?=\^?\{?-[12]\b)")


def conventional(text: str) -> str:
    """Return an answer in math-verify's notation, as far as known here."""
    text = _POWER_OF_TEN.sub(r"\1\\times 10^{\2}", with_exponents(without_end(text)))
    text = _GROUPED.sub(_joined, text)
    text = _ONE_FRACTION.sub(_fraction_of_sign, text)
    if mixed := _MIXED.fullmatch(text.strip().strip("$")):
        text = rf"{mixed.group(1)}\frac{{{mixed.group(2)}}}{{{mixed.group(3)}}}"
    text = _REPEATING.sub(_fraction_of_decimal, text)
    text = _ROOT.sub(lambda match: rf"\sqrt{{{match.group(1) or match.group(2)}}}", text)
    text = _SIGN.sub(lambda match: _SIGNS[match.group()], text)
    return _BEFORE_LETTER.sub("", _DEGREES.sub(r"^{\\circ}", text))


def _joined(match: re.Match[str]) -> str:
    """Return groups of three digits as one number; other groupings are not a number."""
    return re.sub(r"\D", "", match.group()) if _THOUSANDS.fullmatch(match.group()) else match.group()


def _fraction_of_sign(match: re.Match[str]) -> str:
    whole, sign = match.groups()
    above, slash, below = unicodedata.normalize("NFKC", sign).partition("\u2044")
    # A sign such as that of 1/7 has both numbers; the sign for "1 over" has no denominator.
    return rf"{whole}\frac{{{above}}}{{{below}}}" if slash and below else match.group()


def _fraction_of_decimal(match: re.Match[str]) -> str:
    whole, start, *periods = match.groups()
    period = next(each for each in periods if each)
    scale = 10 ** len(start)
    value = Fraction(int(whole + start), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


def is_value(text: str) -> bool:
    """Return whether a text is a number: decimal, a fraction or a mixed one, with or without a unit."""
    return number_and_unit(text) is not None or _PLAIN_FRACTION.fullmatch(text.strip().strip("$").strip()) is not None


def operations_left(answer: str, gold: str) -> set[str]:
    """Return the operations in an answer that its gold answer lacks; none if one side of an equation has none.

    A fraction is a value if the gold answer is not an integer.
    """
    known = _operations(gold)
    if not re.fullmatch(r"[-+]?[\d,]+", plain(gold)):
        known.add("/")
    sides = [side for side in _SIDES.split(answer) if any(map(str.isdigit, side))] or [answer]
    return min((_operations(side) - known for side in sides), key=len)


def _operations(text: str) -> set[str]:
    if number_and_unit(text):
        return set()
    text = with_exponents(text).strip().strip("$").strip()
    text = _SIZES.sub("", text)
    for ignored in (_REMARK, _DEGREE_SIGN, _TENS):
        text = ignored.sub(" ", text)
    operations = {name for name, pattern in _OPERATIONS.items() if pattern.search(text)}
    return operations | ({"/"} if _FRACTION.search(text) else set())


def measure(unit: str) -> dict[str, int] | None:
    """Return the exponents of a unit by symbol, such as {"m": 1, "s": -1}; None if a part is unknown."""
    text = _SPEED.sub("m s", re.sub(r"\bper\b", "/", unicodedata.normalize("NFKC", unit)))
    exponents: dict[str, int] = {}
    sign = 1
    for part in re.split(r"([\s/·*]+)", text.strip()):
        if not part.strip(" ·*"):
            continue
        if part.strip() == "/":
            sign = -1
            continue
        factor = _FACTOR.fullmatch(part)
        symbol = _symbol(factor.group(1)) if factor else ""
        if factor is None or not symbol:
            return None
        exponents[symbol] = exponents.get(symbol, 0) + sign * int(factor.group(2) or 1)
        sign = 1
    return {symbol: n for symbol, n in exponents.items() if n} or None


def _symbol(name: str) -> str:
    if name in _SYMBOLS:
        return name
    lower = name.lower()
    for singular in (lower, lower.removesuffix("s")):
        if symbol := _NAMES.get(singular):
            return symbol
        for prefix, letter in _PREFIXES.items():
            symbol = _NAMES.get(singular.removeprefix(prefix), "") if singular.startswith(prefix) else ""
            if symbol in _PREFIXED:
                return letter + symbol
    return ""
