"""Comparisons of outputs and values exactly as the scorers of well-known forms make them, right or wrong.

Each is tested against the scorer's own code, on generated outputs: `tests/oracles`, `docs/reference/oracles.md`. If a
scorer raises, the values are not equal. Outputs are texts, values plain data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

import numpy as np

_CLOSE = Decimal("1e-6")
_CONTEST_DIFFERENCE = 1e-5


def decimals_by_line(output: str, expected: str) -> bool:
    """LiveCodeBench: as many lines, each equal except for space at its ends, or a list of equal decimals."""
    return _by_line(output, expected, lambda line, expected_line: _decimals(line, expected_line, _equal_decimals))


def close_decimals_by_line(output: str, expected: str) -> bool:
    """NeMo Gym: like LiveCodeBench, with yes and no in any case, and close decimals unless both are whole."""
    return _by_line(
        output,
        expected,
        lambda line, expected_line: (
            (expected_line.lower() in ("yes", "no") and line.lower() == expected_line.lower())
            or _decimals(line, expected_line, _close_decimals)
        ),
    )


def _by_line(output: str, expected: str, same: Callable[[str, str], bool]) -> bool:
    output_lines, expected_lines = output.strip().split("\n"), expected.strip().split("\n")
    return len(output_lines) == len(expected_lines) and all(
        one.strip() == other.strip() or same(one.strip(), other.strip())
        for one, other in zip(output_lines, expected_lines, strict=True)
    )


def _decimals(line: str, expected_line: str, same: Callable[[str, str], bool]) -> bool:
    one, other = line.split(), expected_line.split()
    try:
        return len(one) == len(other) and all(map(same, one, other))
    except (ArithmeticError, ValueError):
        return False


def _equal_decimals(word: str, expected: str) -> bool:
    return Decimal(word) == Decimal(expected)


def _close_decimals(word: str, expected: str) -> bool:
    one, other = Decimal(word), Decimal(expected)
    if one == other:
        return True
    if not any("." in text or "e" in text.lower() for text in (word, expected)):
        return False
    if not (one.is_finite() and other.is_finite()):
        return False
    difference = abs(other - one)
    return difference <= _CLOSE or difference / max(abs(other), Decimal(1)) <= _CLOSE


def close_by_line(output: str, expected: str) -> bool:
    """verl's prime_code: equal as a whole or line by line, or each line one number that is close.

    Numbers are close by numpy's rule, unless all lines consist of digits.
    """
    if (lines := _different_lines(output, expected)) is None:
        return True
    output_lines, expected_lines = lines
    if len(output_lines) != len(expected_lines) or all(
        a.isdigit() and b.isdigit() for a, b in zip(output_lines, expected_lines, strict=True)
    ):
        return False
    return _close_numbers(output_lines, expected_lines)


def loose_by_line(output: str, expected: str) -> bool:
    """APPS: like prime_code, including digits; else the same words, or numbers to three places, in any order."""
    if (lines := _different_lines(output, expected)) is None:
        return True
    output_lines, expected_lines = lines
    if _close_numbers(output_lines, expected_lines):
        return True
    return _same_sets([line.split() for line in output_lines], [line.split() for line in expected_lines])


def loose_as_text(output: str, expected: str) -> bool:
    """TACO: equal except for space at the ends; else by its scorer's rule for the characters of the output."""
    if output.strip() == expected.strip():
        return True
    expected_lines = [line.strip() for line in expected.split("\n") if line]
    # Its scorer reads numbers and words of a text as a row of single characters.
    if _close_numbers(list(output), expected_lines):
        return True
    return _same_sets([list(word) for word in set(output.split())], [line.split() for line in expected_lines])


def _different_lines(output: str, expected: str) -> tuple[list[str], list[str]] | None:
    """Return the full lines of both; None if they are equal by APPS's rule, except for space and empty lines."""
    lines, expected_text = output.splitlines(), expected.strip()
    if "\n".join(lines).strip() == expected_text or "\n".join(line.strip() for line in lines).strip() == expected_text:
        return None
    full_lines = [line for line in lines if line]
    expected_lines = [line.strip() for line in expected.split("\n") if line]
    return None if expected_lines in (lines, full_lines) else (full_lines, expected_lines)


def _close_numbers(texts: Sequence[str], expected: Sequence[str]) -> bool:
    try:
        return len(texts) == len(expected) and bool(np.allclose(list(map(float, texts)), list(map(float, expected))))
    except (ValueError, OverflowError):
        return False


def _same_sets(lines: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]) -> bool:
    if {frozenset(words) for words in lines if words} == {frozenset(words) for words in expected}:
        return True
    try:
        return {frozenset(round(float(word), 3) for word in words) for words in lines if words} == {
            frozenset(round(float(word), 3) for word in words) for words in expected
        }
    except (ValueError, OverflowError):
        return False


def near_words(output: str, expected: str) -> bool:
    """CodeContests: the same words except for case, or numbers that differ by less than 1e-5."""
    output_words, expected_words = _contest_words(output), _contest_words(expected)
    return output_words == expected_words or (
        len(output_words) == len(expected_words)
        and all(_near(one, other) for one, other in zip(output_words, expected_words, strict=True))
    )


def _contest_words(text: str) -> list[str]:
    folded = "".join(char.lower() if char.isascii() else char for char in text)
    for blank in "\n\t\r\v":
        folded = folded.replace(blank, " ")
    return [word for word in folded.split(" ") if word]


def _near(word: str, expected: str) -> bool:
    one, other = _contest_number(word), _contest_number(expected)
    if one is None or other is None:
        return word == expected
    return abs(one - other) < _CONTEST_DIFFERENCE


def _contest_number(word: str) -> float | None:
    """Return a word as C++ parses a double; None if it is not one."""
    if not word.isascii() or "_" in word:
        return None
    try:
        return float(word)
    except ValueError:
        return None


def equal_value(value: Any, expected: Any) -> bool:
    """LiveCodeBench: equal; a tuple equals a list if it is the value itself."""
    return bool(_listed(value) == expected)


def equal_or_close_value(value: Any, expected: Any) -> bool:
    """NeMo Gym: equal like LiveCodeBench, or the same JSON, or close, including the items of a list.

    One of two close values is a float, the other may be a text.
    """
    value = _listed(value)
    if value == expected:
        return True
    try:
        if json.dumps(value) == json.dumps(expected):
            return True
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        if _close_values(value, expected):
            return True
        if not isinstance(value, list) or not isinstance(expected, list) or len(value) != len(expected):
            return False
        return all(map(_close_values, value, expected))
    except OverflowError:
        return False


def _close_values(value: Any, expected: Any) -> bool:
    if value == expected:
        return True
    both = (value, expected)
    if any(isinstance(each, bool) for each in both) or not any(isinstance(each, float) for each in both):
        return False
    if not all(isinstance(each, int | float | str) for each in both):
        return False
    try:
        return bool(np.allclose(float(value), float(expected)))
    except (TypeError, ValueError):
        return False


def equal_or_wrapped_value(value: Any, expected: Any) -> bool:
    """APPS and TACO: equal to the expected value or its first item; for the latter, tuples in a list equal lists."""
    value, expected = _listed(value), with_whole_keys(expected)
    if value == expected:
        return True
    if isinstance(expected, list) and expected and value == expected[0]:
        return True
    try:
        return isinstance(value[0], tuple) and [list(item) for item in value] == expected[0]
    except (TypeError, LookupError):
        return False


def written_value(value: Any, expected: Any) -> bool:
    """verl's prime_code: like APPS, for a JSON value."""
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return equal_or_wrapped_value(value, expected)


def with_whole_keys(expected: Any) -> Any:
    """Return an expected value in APPS's form: an object with integer keys gets them as integers, in a list."""
    first = expected[0] if isinstance(expected, list) and expected else expected
    if not isinstance(first, dict):
        return expected
    try:
        return [{int(key): item for key, item in first.items()}]
    except ValueError:
        return expected


def arguments_with_whole_keys(arguments: Sequence[Any]) -> Sequence[Any]:
    """Return the arguments of APPS's call: an object with integer keys becomes the only argument."""
    if not arguments or not isinstance(arguments[0], dict):
        return arguments
    try:
        return [{int(key): item for key, item in arguments[0].items()}]
    except ValueError:
        return arguments


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def eval_plus(dataset: str, function: str, atol: float) -> Callable[[Sequence[Any], Any, Any], bool]:
    """Return EvalPlus's comparison for one problem's tests, in order: once a float is expected, closeness suffices.

    `dataset` is `humaneval` or `mbpp`. The comparison gets arguments, value and expected value.
    """
    # The scorer keeps this variable from one test to the next.
    kept = [atol]

    def same(arguments: Sequence[Any], value: Any, expected: Any) -> bool:
        try:
            return _as_eval_plus(dataset, function, arguments, value, expected, kept)
        except Exception:
            # The scorer catches any exception.
            return False

    return same


def _as_eval_plus(
    dataset: str, function: str, arguments: Sequence[Any], value: Any, expected: Any, kept: list[float]
) -> bool:
    special = special_of_eval_plus(dataset, function, arguments, value, expected, kept[0])
    if function == "find_zero" and dataset == "humaneval":
        return bool(special)
    exact = special if dataset == "mbpp" and function in (*_SETS, *_NOT_NONE) else special or value == expected
    items = expected if isinstance(expected, list | tuple) and expected else [expected]
    if kept[0] == 0 and all(isinstance(item, float) for item in items):
        kept[0] = 1e-6
    if exact or kept[0] == 0:
        return bool(exact)
    if type(value) is not type(expected) or (isinstance(expected, list | tuple) and len(value) != len(expected)):
        return False
    return bool(np.allclose(value, expected, rtol=1e-07, atol=kept[0]))


def special_of_eval_plus(
    dataset: str, function: str, arguments: Sequence[Any], value: Any, expected: Any, atol: float
) -> bool:
    """Return whether EvalPlus accepts a value by a rule for that problem only. Raises any error of such a rule."""
    if dataset == "humaneval":
        if function != "find_zero":
            return False
        return bool(abs(sum(factor * math.pow(value, power) for power, factor in enumerate(arguments[0]))) <= atol)
    if function in _SETS:
        return set(value) == set(expected)
    if function in _NOT_NONE:
        return bool((value if isinstance(value, bool) else value is not None) == expected)
    if function == "surface_Area":
        return bool(value == expected or abs(value - _pyramid_surface(*arguments)) <= atol)
    if function == "digit_distance_nums":
        return bool(value == _digit_distance(*arguments))
    return function == "are_equivalent" or (function == "sum_div" and value == 0)


_SETS = (
    *("similar_elements", "find_char_long", "common_in_nested_lists", "extract_singly", "larg_nnum"),
    *("intersection_array", "find_dissimilar", "Diff"),
)
_NOT_NONE = ("check_str", "text_match_three", "text_starta_endb")


def _pyramid_surface(base: float, height: float) -> int:
    slant = math.sqrt((base / 2) ** 2 + height**2)
    return round(base**2 + 4 * (base * slant) / 2)


def _digit_distance(one: int, other: int) -> int:
    width = max(len(str(one)), len(str(other)))
    return sum(abs(int(a) - int(b)) for a, b in zip(str(one).zfill(width), str(other).zfill(width), strict=True))
