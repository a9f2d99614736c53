r"""Operations that an answer leaves unevaluated, such as `1234\cdot5678` where the value is requested."""

from __future__ import annotations

import re

from workers.evaluators.answers.normal_text import number_and_unit, plain, with_exponents

_REMARK = re.compile(
    r"\\(?:text[a-z]*|mathrm|mbox|operatorname)\s*\{\s*(?![a-z]*(?:gcd|lcm|mod|det|log)\b)[^{}]*\}(\^\{?-?\d\}?)?"
)
_POWER_OF_TEN = re.compile(
    r"(?:^|(?<=[\d.}])\s*(?:\\times|\\cdot|[\u00d7\u00b7*x])\s*)10\s*\^\s*(?:\{\s*[-+]?\d+\s*\}|\d)"
)
_SIZES = re.compile(r"\\(?:left|right|[Bb]igg?[lr]?)(?![A-Za-z])\s*")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|°")
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
    for ignored in (_REMARK, _DEGREES, _POWER_OF_TEN):
        text = ignored.sub(" ", text)
    found = {name for name, pattern in _OPERATIONS.items() if pattern.search(text)}
    return found | ({"/"} if _FRACTION.search(text) else set())
