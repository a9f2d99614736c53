"""Compares a program's output or value with the expected one: plain data, outside the sandbox."""

from __future__ import annotations

import math
import re
from decimal import Context, Decimal
from typing import Any

FORM = "form"
"""The mode of rows with their form's own rule: the farm's comparison of `form_rules.py`."""
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,4})?")
_INTEGER = re.compile(r"[-+]?\d+")
_MAX_NUMBER_CHARS = 400
_TOLERANCE = 1e-9
"""The tolerated difference from an expected float, relative or absolute."""
_MAX_DEPTH = 200
_MAX_EXPONENT = 400
_MAX_WHOLE = 10**9
_REAL_DECIMALS = 6
"""Number of decimals from which an expected number counts as rounded, not exact."""
_MILLIONTH, _SMALL = 1e-6, 1e-9
_NOISE = 1e-12
_EXACTLY = Context(prec=60)


def tolerance_of(compare: str) -> float | None:
    """Return the EPS of `float:EPS`, None for other modes. Raises ValueError for an unknown mode."""
    if compare in ("lines", "tokens", "checker", FORM):
        return None
    name, _, text = compare.partition(":")
    if name != "float" or not _NUMBER.fullmatch(text) or not 0 < float(text) < 1:
        raise ValueError(f"{compare!r} is not a comparison mode: use lines, tokens, float:EPS, checker or form")
    return float(text)


def same_output(output: str, expected: str, compare: str = "lines") -> bool:
    """Return whether an output is the expected one.

    `lines`: except for space at the ends of lines, and empty lines at the end. `tokens`: except for all space.
    `float:EPS`: tokens; numbers may differ by EPS, absolute or relative, unless both are integers.
    """
    if compare == "lines":
        return _lines(output) == _lines(expected)
    output_words, expected_words = output.split(), expected.split()
    if compare == "tokens":
        return output_words == expected_words
    eps = tolerance_of(compare)
    assert eps is not None
    return len(output_words) == len(expected_words) and all(
        _near(a, b, eps) for a, b in zip(output_words, expected_words, strict=True)
    )


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _near(word: str, expected: str, eps: float) -> bool:
    if word == expected:
        return True
    if max(len(word), len(expected)) > _MAX_NUMBER_CHARS or not (
        _NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)
    ):
        return False
    if _INTEGER.fullmatch(word) and _INTEGER.fullmatch(expected):
        return int(word) == int(expected)
    return math.isclose(float(word), float(expected), rel_tol=eps, abs_tol=eps)


Tolerance = tuple[float, float]
"""The tolerance of a number: relative to the expected one, and absolute; the two are added."""


def same_lines(
    output: str, expected: str, *, close: Tolerance | None = None, counts_empty: bool = True, verdicts: bool = False
) -> bool:
    """Return whether an output is the expected one for a row whose form has its own scorer.

    Lines are compared without space at both ends, words as text. Numbers are equal as decimals. For an expected number
    with decimals, floating-point noise is tolerated; if it shows six decimals or more, so is a difference after the
    last of them, or of a millionth. An integer is exact.

    `close`: the tolerance for an expected number with decimals; a number with decimals may then differ from an expected
    integer of up to nine digits by a millionth. Without `counts_empty`, empty lines inside are ignored. With
    `verdicts`, a line of yes or no matches in any case.
    """
    output_lines, expected_lines = output.strip().split("\n"), expected.strip().split("\n")
    if not counts_empty:
        output_lines = [line for line in output_lines if line.strip()]
        expected_lines = [line for line in expected_lines if line.strip()]
    return len(output_lines) == len(expected_lines) and all(
        _same_line(a.strip(), b.strip(), close) or (verdicts and _same_verdict(a.strip(), b.strip()))
        for a, b in zip(output_lines, expected_lines, strict=True)
    )


def same_words(output: str, expected: str, *, close: Tolerance | None = None) -> bool:
    """Return whether an output has the expected words, however spaced; numbers as in `same_lines`, yes in any case."""
    output_words, expected_words = output.split(), expected.split()
    return len(output_words) == len(expected_words) and all(
        _same_word(a, b, close) or _same_verdict(a, b) for a, b in zip(output_words, expected_words, strict=True)
    )


def _same_verdict(text: str, expected: str) -> bool:
    return expected.lower() in ("yes", "no") and text.lower() == expected.lower()


def _same_line(line: str, expected: str, close: Tolerance | None) -> bool:
    if line == expected:
        return True
    one, other = line.split(), expected.split()
    if len(one) != len(other) or not all(_same_word(a, b, close) for a, b in zip(one, other, strict=True)):
        return False
    # Between words the space may be significant.
    return all(map(_NUMBER.fullmatch, other)) or re.findall(r"\s+", line) == re.findall(r"\s+", expected)


def _same_word(word: str, expected: str, close: Tolerance | None) -> bool:
    if word == expected:
        return True
    if not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)):
        return False
    one, other = Decimal(word), Decimal(expected)
    if one == other:
        return True
    if max(abs(one.adjusted()), abs(other.adjusted())) > _MAX_EXPONENT:
        return False
    difference, size = abs(_EXACTLY.subtract(one, other)), abs(other)
    if _INTEGER.fullmatch(expected):
        return close is not None and size < _MAX_WHOLE and difference <= Decimal(_MILLIONTH)
    if close and difference <= _within(size, *close):
        return True
    has_exponent = "e" in expected.lower()
    n_decimals = -int(other.as_tuple().exponent) if has_exponent else len(expected.partition(".")[2])
    if n_decimals < _REAL_DECIMALS:
        return difference <= _within(size, _NOISE, _NOISE)
    if difference <= _within(size, _MILLIONTH, _SMALL):
        return True
    return not has_exponent and 2 * difference <= Decimal(10) ** -n_decimals


def _within(size: Decimal, relative: float, absolute: float) -> Decimal:
    return _EXACTLY.add(_EXACTLY.multiply(Decimal(relative), size), Decimal(absolute))


def same_value(
    value: Any, expected: Any, eps: float | None = None, *, close: Tolerance = (_TOLERANCE, _TOLERANCE)
) -> bool:
    """Return whether a function's value is the expected one, by JSON's types: a tuple is a list.

    Keys of JSON objects are texts: a key of another type is compared by its text. Numbers may differ by `eps`, relative
    or absolute, if one is a float; without `eps`, only if a float is expected, as `close` says.
    """
    return _same(value, expected, (eps, close), _MAX_DEPTH)


def _same(value: Any, expected: Any, eps: tuple[float | None, Tolerance], depth: int) -> bool:
    if depth == 0:
        return False
    if isinstance(expected, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(expected)
            and all(_same(a, b, eps, depth - 1) for a, b in zip(value, expected, strict=True))
        )
    if isinstance(expected, dict):
        if not isinstance(value, dict) or len(value) != len(expected):
            return False
        by_text = {_key(key): item for key, item in value.items()}
        return all(
            _key(key) in by_text and _same(by_text[_key(key)], item, eps, depth - 1) for key, item in expected.items()
        )
    if expected is None or isinstance(expected, str | bytes | set | frozenset):
        return type(value) is type(expected) and value == expected
    return _same_number(value, expected, eps)


def _key(key: Any) -> str:
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return key if isinstance(key, str) else repr(key)[:_MAX_NUMBER_CHARS]


def _same_number(value: Any, expected: Any, eps: tuple[float | None, Tolerance]) -> bool:
    """Return whether two numbers are equal; True equals 1, as for the graders of these data sets."""
    if not isinstance(value, int | float | complex):
        return False
    if value == expected:
        return True
    any_float, (relative, absolute) = eps
    inexact = (expected,) if any_float is None else (value, expected)
    if isinstance(value, complex) or isinstance(expected, complex):
        return False
    if not any(isinstance(each, float) for each in inexact):
        return False
    try:
        if any_float is not None:
            return math.isclose(value, expected, rel_tol=any_float, abs_tol=any_float)
        return math.isfinite(expected) and abs(value - expected) <= absolute + relative * abs(expected)
    except OverflowError:
        return False
