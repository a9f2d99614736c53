r"""Notations unknown to math-verify, rewritten as known ones: `1\,000`, `2½`, `0.\overline{3}`, `√2`.

Only unambiguous notations are rewritten. Data sets' own scorers read most of them: DAPO's drops spaces, PRM800K's reads
`2 1/3` as a mixed number and knows the signs for roots and infinity.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from workers.evaluators.answers.normal_text import with_exponents, without_end

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
    above, found, below = unicodedata.normalize("NFKC", sign).partition("\u2044")
    # A sign such as that of 1/7 has both numbers; the sign for "1 over" has no denominator.
    return rf"{whole}\frac{{{above}}}{{{below}}}" if found and below else match.group()


def _fraction_of_decimal(match: re.Match[str]) -> str:
    whole, start, *periods = match.groups()
    period = next(each for each in periods if each)
    scale = 10 ** len(start)
    value = Fraction(int(whole + start), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
    return str(value) if value.denominator == 1 else rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
