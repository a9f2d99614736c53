"""Answers as plain text: equal except for typesetting, letter case, articles and a final full stop."""

from __future__ import annotations

import math
import re
import unicodedata

_TEXT = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|texttt|textsc|textnormal|emph|mathrm|mathbf|mathsf|mathit|mbox|operatorname)"
    r"\s*\{((?:[^{}]|\{[^{}]*\})*+)\}"
)
_DOLLARS = re.compile(r"^(?:\$\$?|\\\(|\\\[)(.*?)(?:\$\$?|\\\)|\\\])$", re.DOTALL)
_SPACES = re.compile(r"(?:\\[,;:! ]|~|\s)+(\^)?")
_ARTICLE = re.compile(r"^(?:the|an?) ", re.IGNORECASE)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[^{}]*\}")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{4,}")
_LETTER_WORD = re.compile(r"[A-Z]{3,}")
_GLUED_LETTER = re.compile(r"\d[A-Za-z]\.?$")
"""The end of `3m`, a product or a family; with a space, or in a text, it is a unit."""
_FUNCTIONS = frozenset(
    {"sqrt", "sinh", "cosh", "tanh", "sech", "csch", "coth", "frac", "asin", "acos", "atan", "arcsin", "arccos"}
)
_NUMBER = re.compile(
    r"([-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?(?:e[-+]?\d+)?)(?:\s*(?:\\times|\\cdot|x|\*)\s*10\^\{?([-+]?\d+)\}?)?(.*)",
    re.IGNORECASE | re.DOTALL,
)
_WHOLE = re.compile(
    r"([-+]?(?:\d{1,3}(?:,\d{3})+|\d+))(?:\.0*)?(?![\d.,^*/]|\s*(?:\\times|\\cdot|x\b|\*|e[-+]?\d))",
    re.IGNORECASE,
)
_UNIT = re.compile(r"(?:\\(?:mu|omega|ohm|degree|AA)|[a-zµμ°ω]{1,20})(?:\^\{?-?\d\}?|-?\d)?", re.IGNORECASE)
_NO_UNITS = frozenset(
    {"or", "and", "not", "to", "but", "vee", "wedge", "lor", "land", "pm", "mp", "e", "pi", "i", "x", "n"}
    | {"thousand", "thousands", "hundred", "hundreds", "million", "millions", "billion", "billions"}
    | {"trillion", "dozen", "sqrt", "sin", "cos", "tan", "cot", "log", "ln", "lg", "exp", "abs", "gcd", "lcm", "max"}
    | {"bn", "lakh", "crore", "half", "halves", "third", "thirds", "tenths", "hundredths", "squared", "cubed", "mod"}
)
_SUPERSCRIPTS = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b]+")
_SHORT_WORDS = frozenset(
    {"no", "yes", "on", "off", "up", "odd", "all", "any", "one", "two", "six", "ten", "red", "sun", "man", "men", "day"}
    | {"mon", "tue", "wed", "thu", "fri", "sat", "or", "in", "is", "it", "he", "she", "we", "us", "cat", "dog", "not"}
)
_QUOTES = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")
_ARTICLES = frozenset({"a", "an", "the"})
_BETWEEN_WORDS = re.compile(r"(?<!\d)[^\w\s^=+*/<>|\\%](?!\d)")
_SIGN = re.compile(r"[\d^_=+*/<>|\\%]")
_TOKEN = re.compile(r"(?<![\w.])-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\d+(?:\.\d+)?|[^\W\d_]+|[\^_=+*/<>|\\%]")
_LETTERS = re.compile(r"(?<!\\)(?<![^\W\d_])[^\W\d_]+")
_FORMULA = re.compile(r"[0-9\\^_=+*/<>|(){}\[\]]")
_STATEMENTS = re.compile(
    r"\\\\|\\(?:to|implies|iff|lor|vee|(?:Long)?(?:right|leftright)arrow)\b|(?<!\\);|[→⇒⇔\u2228]|,\s|"
    r"\b(?:i\.e\.|(?:or|so|hence|thus|therefore|that is|maybe|perhaps)\b)",
    re.IGNORECASE,
)
_NAME = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?(?:\([A-Za-z]\))?")


def plain(text: str) -> str:
    """Return an answer without typesetting marks, on one line."""
    text = unicodedata.normalize("NFKC", with_exponents(text)).strip()
    while (inner := _DOLLARS.match(text)) and "$" not in inner.group(1):
        text = inner.group(1).strip()
    for _ in range(4):
        text = _TEXT.sub(lambda match: f" {match.group(1)} ", text)
    text = _SPACES.sub(lambda gap: gap.group(1) or " ", text)
    return text.replace("{,}", ",").strip()


def words(text: str) -> str:
    """Return an answer for comparison as words."""
    text = _ARTICLE.sub("", plain(text).translate(_QUOTES).strip("*_ ").rstrip(".").strip())
    in_formula = _FORMULA.search(text) is not None
    return _LETTERS.sub(lambda run: _folded(run.group(), in_formula), text)


def _folded(run: str, in_formula: bool) -> str:
    """Return letters without their case if they are a word; symbols and units keep it: `mW` is not `MW`."""
    lower = run.casefold()
    # Milli and mega differ in their case.
    shortest = (6 if lower[0] == "m" else 4) if in_formula else 3
    is_word = len(run) >= shortest or (lower in _SHORT_WORDS and not in_formula)
    return lower if is_word else run


def same_words(one: str, other: str) -> bool:
    """Return whether two texts have the same numbers, signs and words, whatever punctuation is between words.

    The case of words is ignored, that of symbols and units is not.
    """
    return _tokens(one) == _tokens(other)


def _tokens(text: str) -> list[str]:
    text = _BETWEEN_WORDS.sub("", plain(text).translate(_QUOTES))
    longest_symbol = 3 if _SIGN.search(text) else 1
    tokens = []
    for token in _TOKEN.findall(text):
        token = token.replace(",", "")
        if token.casefold() not in _ARTICLES:
            tokens.append(token.casefold() if len(token) > longest_symbol else token)
    return tokens


def balanced(text: str) -> bool:
    """Return whether the braces of a text match, as those of a box always do."""
    depth = 0
    for at, char in enumerate(text):
        if char in "{}" and not (at and text[at - 1] == "\\"):
            depth += 1 if char == "{" else -1
            if depth < 0:
                return False
    return depth == 0


def without_end(text: str) -> str:
    r"""Return a text without commas and semicolons at its end; `\,` and `\;` are spaces."""
    text = text.strip()
    while text.endswith((",", ";")) and not text.endswith(("\\,", "\\;")):
        text = text[:-1].rstrip()
    return text


def with_exponents(text: str) -> str:
    """Return a text with superscript digits as exponents: `2³` is not 23."""
    return _SUPERSCRIPTS.sub(lambda run: _exponent(unicodedata.normalize("NFKC", run.group())), text)


def _exponent(digits: str) -> str:
    digits = digits.replace("\u2212", "-")
    return f"^{digits}" if len(digits) == 1 else f"^{{{digits}}}"


def claimed_values(text: str) -> list[float]:
    """Return the numbers that an answer states, as in `x = 25` and `25 = 24`; an unsolved equation states none."""
    values = []
    for statement in _STATEMENTS.split(text):
        sides = [side for each in statement.split("=") if (side := plain(each).strip(" ,"))]
        numbers = [number_and_unit(side) for side in sides]
        if all(number is not None or _NAME.fullmatch(side) for side, number in zip(sides, numbers, strict=True)):
            values += [number[0] for number in numbers if number is not None]
    return values


def has_words(text: str) -> bool:
    """Return whether an answer has words, whose letters a formula would multiply in any order."""
    if _LETTER_WORD.fullmatch(plain(text)):
        return True
    tokens = _WORD.findall(_ENVIRONMENT.sub(" ", plain(text)))
    return any(word not in _FUNCTIONS for word in tokens) or plain(text).lower() in _SHORT_WORDS


def whole_number(text: str) -> int | None:
    """Return the value of a whole number in digits, with or without a unit; None for others."""
    match = _WHOLE.match(plain(text))
    return int(match.group(1).replace(",", "")) if match else None


def ends_in_glued_letter(text: str) -> bool:
    """Return whether a number is directly followed by one letter."""
    return _GLUED_LETTER.search(plain(text)) is not None


def _is_unit(part: str) -> bool:
    base = re.sub(r"[\\^{}\d-]", "", part)
    # Kelvin is K and newton N, but k is a thousand and n any number.
    return bool(_UNIT.fullmatch(part)) and base != "k" and (base == "N" or base.lower() not in _NO_UNITS)


def number_and_unit(text: str) -> tuple[float, str] | None:
    """Return the number and the unit, possibly empty, of an answer such as `5e14 Hz`; None for others."""
    match = _NUMBER.fullmatch(plain(text))
    if match is None:
        return None
    number, exponent, rest = match.groups()
    if len(number) > 100 or (exponent and len(exponent) > 4):
        return None
    rest = rest.strip().rstrip(".").replace("\\cdot", "·")
    parts = [part for part in re.split(r"[\s/·*]+", rest) if part]
    if len(parts) > 4 or not all(map(_is_unit, parts)):
        return None
    unit = re.sub(r"[{}^\\]", "", rest)
    unit = re.sub(r"\s+", " ", re.sub(r"\s*([/·*])\s*", r"\1", unit))
    digits, _, power = number.replace(",", "").lower().partition("e")
    # As text, since `10.0 ** 400` overflows.
    value = float(f"{digits}e{int(power or 0) + int(exponent or 0)}")
    return (value, unit) if math.isfinite(value) else None
