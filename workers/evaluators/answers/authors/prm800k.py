r"""The grader of PRM800K, part of scorers of slime and verl: equal as text, or by sympy's `simplify`.

Answers are compared as by `hendrycks_math`; then units, typesetting and LaTeX are removed and elements compared one by
one by sympy. So this belongs to verifiers of the grader, each run in its own fork.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from workers.evaluators.answers.authors.hendrycks_math import normalized as normalized_as_text
from workers.evaluators.answers.authors.latex_text import plain_text

_REPLACED_FIRST = (
    *(("\\%", "%"), ("\\$", "$"), ("$", ""), ("%", ""), (" or ", " , "), (" and ", " , ")),
    *(("million", "*10^6"), ("billion", "*10^9"), ("trillion", "*10^12")),
)
UNITS = (
    *("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year"),
    *("foot", "feet", "inch", "yard"),
)
"""Units to remove, in this order."""
_IN_TEXT = re.compile(r"^\\text\{(?P<text>.+?)\}$")
_DEGREES = re.compile(r"\^ *\\circ")
_COMMA_WITHOUT_SPACE = re.compile(r",\\! *")
_MIXED = re.compile("([0-9]) +([0-9])")
_THOUSANDS = re.compile(r"(\d)(,)(\d\d\d)($|\D)")
_FRACTION = re.compile(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$")
_AS_SYMPY = str.maketrans(
    {"\u221a": "sqrt", "\u03c0": "pi", "\u221e": "inf", "\u222a": "U", "\u00b7": "*", "\u00d7": "*"}
)
_POWERS = re.compile(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+")
"""Powers that the authors' scorer does not evaluate."""
_BRACKETS = "()[]"
_MAX_UNKNOWNS = 2


def equal(answer: str, gold: str, normalized: Callable[[str], str]) -> bool:
    """Return whether two answers are equal; `normalized` returns the form that sympy compares."""
    return _as_text(answer) == _as_text(gold) or _as_numbers(normalized(answer), normalized(gold))


@cache
def load() -> Any:
    """Import the expression parser at its first use: once in the grader."""
    from sympy.parsing import sympy_parser

    return sympy_parser


def _as_text(answer: str) -> str:
    answer = answer.strip()
    try:
        if match := _IN_TEXT.search(answer):
            answer = match.group("text").strip()
        return normalized_as_text(answer)
    except (IndexError, ValueError):
        return answer


def _as_numbers(answer: str, gold: str) -> bool:
    if answer == gold:
        return True
    if not answer:
        return False
    answers, golds = _elements(answer), _elements(gold)
    if len(golds) != len(answers) or (len(golds) > 1 and (answer[0], answer[-1]) != (gold[0], gold[-1])):
        return False
    return bool(golds) and all(map(_same_element, golds, answers))


def _same_element(gold: str, answer: str) -> bool:
    if _FRACTION.search(gold) and _FRACTION.search(answer):
        # An unreduced fraction is wrong.
        return gold == answer
    return _is_whole(gold) == _is_whole(answer) and _same_value(gold, answer)


def _same_value(gold: str, answer: str) -> bool:
    difference = f"({gold})-({answer})"
    unknowns = {each for each in difference.replace("sqrt", "").replace("frac", "") if each.isalpha()}
    if len(unknowns) > _MAX_UNKNOWNS or _POWERS.search(difference):
        return False
    import sympy

    parser = load()
    names = {name: value for name, value in vars(sympy).items() if not name.startswith("_")}
    try:
        parsed = parser.parse_expr(
            difference.replace("^", "**"),
            local_dict={},
            global_dict={"__builtins__": {}, **names},
            transformations=(*parser.standard_transformations, parser.implicit_multiplication_application),
        )
        return bool(sympy.simplify(parsed) == 0)
    except Exception:
        # Unreadable expressions equal nothing in the authors' scorer.
        return False


def normalized(answer: str, *, units: Sequence[str] = UNITS, removed: str = "") -> str:
    """Return an answer without units, typesetting and the characters `removed`, with LaTeX in sympy's syntax."""
    if match := _IN_TEXT.search(answer):
        answer = match.group("text")
    for before, after in _REPLACED_FIRST:
        answer = answer.replace(before, after)
    for unit in units:
        answer = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", answer)
    answer = _DEGREES.sub("", answer)
    if answer[:1] == "{" and answer[-1] == "}":
        answer = answer[1:-1]
    answer = _COMMA_WITHOUT_SPACE.sub("", answer)
    number = _number(answer)
    if number is not None and _is_near_whole(number):
        answer = str(round(number))
    if "\\" in answer:
        answer = _without_latex(answer)
    answer = re.sub("- *", "-", answer)
    answer = _MIXED.sub("\\1+\\2", answer).translate(dict.fromkeys(map(ord, removed))).lower()
    return str(int(float(answer.replace(",", "")))) if _is_whole(answer) else answer


def _without_latex(text: str) -> str:
    try:
        text = text.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\frac", " \\frac")
        return plain_text(text).translate(_AS_SYMPY).strip()
    except ValueError:
        return text


def _elements(text: str) -> list[str]:
    """Return the elements of a tuple or an interval, or the text itself."""
    text = _without_thousands(text)
    if not text:
        return []
    inner = text[1:-1]
    if (
        len(text) > 2
        and text[0] in _BRACKETS
        and text[-1] in _BRACKETS
        and not any(each in inner for each in _BRACKETS)
    ):
        return [part.strip() for part in inner.split(",")]
    return [text]


def _without_thousands(text: str) -> str:
    while (shorter := _THOUSANDS.sub("\\1\\3\\4", text)) != text:
        text = shorter
    return text


def _is_whole(text: str) -> bool:
    number = _number(_without_thousands(text))
    return number is not None and _is_near_whole(number)


def _is_near_whole(number: float) -> bool:
    try:
        return abs(number - round(number)) <= 1e-7
    except (ValueError, OverflowError):
        return False


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
