"""Answers as plain text: what is equal but for typesetting, letter case, articles and a final full stop."""

from __future__ import annotations

import re
import unicodedata

_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_DOLLARS = re.compile(r"^(?:\$\$?|\\\(|\\\[)(.*?)(?:\$\$?|\\\)|\\\])$", re.DOTALL)
_SPACES = re.compile(r"\\[,;:! ]|~|\s+")
_ARTICLE = re.compile(r"^(?:the|an?) ", re.IGNORECASE)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[^{}]*\}")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{4,}")
_FUNCTIONS = frozenset(
    {"sqrt", "sinh", "cosh", "tanh", "sech", "csch", "coth", "frac", "asin", "acos", "atan", "arcsin", "arccos"}
)
_NUMBER = re.compile(
    r"([-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?(?:e[-+]?\d+)?)(?:\s*(?:\\times|\\cdot|x|\*)\s*10\^\{?([-+]?\d+)\}?)?(.*)",
    re.IGNORECASE | re.DOTALL,
)
_UNIT = re.compile(r"\\?[a-zµμ°ω]{1,20}(?:\^?\{?-?\d\}?)?", re.IGNORECASE)
_NO_UNITS = frozenset(
    {"or", "and", "not", "to", "but", "vee", "wedge", "lor", "land", "pm", "mp", "e", "pi", "i", "x", "n"}
)


def plain(text: str) -> str:
    """Return an answer without the marks of typesetting, on one line."""
    text = unicodedata.normalize("NFKC", text).strip()
    while (inner := _DOLLARS.match(text)) and "$" not in inner.group(1):
        text = inner.group(1).strip()
    for _ in range(4):
        text = _TEXT.sub(lambda match: f" {match.group(1)} ", text)
    return _SPACES.sub(" ", text).replace("{,}", ",").strip()


def words(text: str) -> str:
    """Return an answer for comparing it as words."""
    return _ARTICLE.sub("", plain(text).strip("*_ ").rstrip(".").strip()).casefold()


def has_words(text: str) -> bool:
    """Return whether an answer has words, whose letters a formula would multiply, in whatever order they stand."""
    found = _WORD.findall(_ENVIRONMENT.sub(" ", plain(text)))
    return any(word not in _FUNCTIONS for word in found)


def number_and_unit(text: str) -> tuple[float, str] | None:
    """Return the number and the unit of an answer such as `5e14 Hz`, whose unit may be empty; None for others."""
    match = _NUMBER.fullmatch(plain(text))
    if match is None:
        return None
    number, exponent, rest = match.groups()
    if len(number) > 100 or (exponent and len(exponent) > 4):
        return None
    parts = [part for part in re.split(r"[\s/·*]+", rest.strip().rstrip(".")) if part]
    if len(parts) > 4 or any(not _UNIT.fullmatch(part) or part.strip("\\").lower() in _NO_UNITS for part in parts):
        return None
    unit = re.sub(r"[\s{}^\\]", "", rest.strip().rstrip("."))
    return float(number.replace(",", "")) * 10.0 ** int(exponent or 0), unit
