"""Comparison of a program's output or value with the expected one: plain data, compared outside of the sandbox."""

from __future__ import annotations

import math
import re
from typing import Any

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,4})?")
_INTEGER = re.compile(r"[-+]?\d+")
_MAX_NUMBER_CHARS = 400
_TOLERANCE = 1e-9
"""The difference, relative or absolute, that a value may have from an expected float."""
_MAX_DEPTH = 200


def tolerance_of(compare: str) -> float | None:
    """Return the EPS of `float:EPS`, None for other modes. Raises ValueError for what is no mode."""
    if compare in ("lines", "tokens", "checker"):
        return None
    name, _, text = compare.partition(":")
    if name != "float" or not _NUMBER.fullmatch(text) or not 0 < float(text) < 1:
        raise ValueError(f"{compare!r} is no way to compare: use lines, tokens, float:EPS or checker")
    return float(text)


def same_output(output: str, expected: str, compare: str = "lines") -> bool:
    """Return whether an output is the expected one.

    `lines`: but for space at the ends of lines, and empty lines at the end. `tokens`: but for all space. `float:EPS`:
    tokens, of which numbers may differ by EPS, absolute or relative, unless both are integers.
    """
    if compare == "lines":
        return _lines(output) == _lines(expected)
    ours, theirs = output.split(), expected.split()
    if compare == "tokens":
        return ours == theirs
    eps = tolerance_of(compare)
    assert eps is not None
    return len(ours) == len(theirs) and all(_near(a, b, eps) for a, b in zip(ours, theirs, strict=True))


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _near(ours: str, theirs: str, eps: float) -> bool:
    if ours == theirs:
        return True
    if max(len(ours), len(theirs)) > _MAX_NUMBER_CHARS or not (_NUMBER.fullmatch(ours) and _NUMBER.fullmatch(theirs)):
        return False
    if _INTEGER.fullmatch(ours) and _INTEGER.fullmatch(theirs):
        return int(ours) == int(theirs)
    return math.isclose(float(ours), float(theirs), rel_tol=eps, abs_tol=eps)


def same_value(value: Any, expected: Any, eps: float | None = None) -> bool:
    """Return whether the value of a function is the expected one, as JSON would have it: a tuple is a list.

    Keys of JSON objects are texts: a key of another type is compared by its text. Numbers of which one is a float may
    differ by `eps`; without it, only where a float is expected, by 1e-9.
    """
    return _same(value, expected, eps, _MAX_DEPTH)


def _same(value: Any, expected: Any, eps: float | None, depth: int) -> bool:
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


def _same_number(value: Any, expected: Any, eps: float | None) -> bool:
    """Return whether two numbers are equal; True is 1, as it is to the graders of these data sets."""
    if not isinstance(value, int | float | complex):
        return False
    if value == expected:
        return True
    inexact = (expected,) if eps is None else (value, expected)
    if isinstance(value, complex) or isinstance(expected, complex):
        return False
    if not any(isinstance(each, float) for each in inexact):
        return False
    eps = _TOLERANCE if eps is None else eps
    try:
        return math.isclose(value, expected, rel_tol=eps, abs_tol=eps)
    except OverflowError:
        return False
