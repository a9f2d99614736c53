from __future__ import annotations

from typing import Any

import pytest

from workers.evaluators.program_tests.output_comparison import (
    same_lines,
    same_output,
    same_value,
    same_words,
    tolerance_of,
)


@pytest.mark.parametrize(
    ("output", "expected", "compare", "same"),
    [
        ("3\n1\n", "3\n1", "lines", True),
        ("3 \n1\n\n\n", "3\n1\n", "lines", True),
        ("3\r\n1\r\n", "3\n1\n", "lines", True),
        (" 3\n", "3\n", "lines", False),
        ("3\n\n1\n", "3\n1\n", "lines", False),
        ("", "\n", "lines", True),
        ("3 1", "3\n1\n", "lines", False),
        ("3 1", "3\n1\n", "tokens", True),
        ("3 1 2", "3\n1\n", "tokens", False),
        ("0.30000000000000004", "0.3", "tokens", False),
        ("0.30000000000000004", "0.3", "float:1e-6", True),
        ("yes 0.3000001", "yes 0.3", "float:1e-6", True),
        ("1e9", "1000000000.5", "float:1e-6", True),
        ("nan", "0.3", "float:1e-6", False),
        ("inf", "0.3", "float:1e-6", False),
        ("0_3", "03", "float:1e-6", False),
        ("0.3 0.3", "0.3", "float:1e-6", False),
        ("9" * 1000, "1", "float:1e-6", False),
        ("1e9999", "1", "float:1e-6", False),
        ("1000001", "1000000", "float:1e-6", False),
        ("+1000000 -0", "1000000 0", "float:1e-6", True),
        ("1000000.5", "1000000", "float:1e-6", True),
    ],
)
def test_outputs_are_compared_by_the_rows_mode(output: str, expected: str, compare: str, same: bool) -> None:
    assert same_output(output, expected, compare) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ((0, 1), [0, 1], True),
        ([(1, 2)], [[1, 2]], True),
        ({1: "a"}, {"1": "a"}, True),
        ({None: 1, True: 2}, {"null": 1, "true": 2}, True),
        (0.1 + 0.2, 0.3, True),
        (0.3001, 0.3, False),
        (3, 3.0, True),
        (True, 1, True),
        ("3", 3, False),
        ([3], 3, False),
        (None, 0, False),
        (None, None, True),
        ({1, 2}, [1, 2], False),
        (float("nan"), 1.0, False),
        (10**400, 1.5, False),
        ({"a": 1, "b": 2}, {"a": 1}, False),
        ([1, 2, 3], [1, 2], False),
        (2.0**200, 2**200, True),
        (2.0**200, 2**200 + 12345, False),
        (10000000000.9, 10000000000, False),
        (5e-10, 0, False),
        (5.0, 5, True),
        (5e-10, 0.0, True),
        (0.1 + 0.2 + 0j, 0.3, False),
        (1 + 0j, 1, True),
    ],
)
def test_values_are_compared_as_json(value: Any, expected: Any, same: bool) -> None:
    assert same_value(value, expected) is same


def test_row_may_allow_a_difference_from_an_integer_too() -> None:
    assert same_value(1.9999999, 2, 1e-6)
    assert not same_value(1000001, 1000000, 1e-6)


def test_too_deeply_nested_values_are_unequal() -> None:
    deep: Any = []
    for _ in range(1000):
        deep = [deep]
    assert not same_value(deep, deep)


@pytest.mark.parametrize("compare", ["exact", "float", "float:", "float:0", "float:2", "float:nan", ""])
def test_unknown_comparison_mode_is_refused(compare: str) -> None:
    with pytest.raises(ValueError, match="is not a comparison mode"):
        tolerance_of(compare)


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1.5\n", "1.50", True),
        ("2.0", "2", True),
        ("  *\n ***\n", "  *\n ***", True),
        ("* *", "*  *", False),
        ("1  2", "1 2", True),
        ("YES 1.5", "YES 1.50", True),
        ("YES  1.5", "YES 1.50", False),
        ("yes", "YES", False),
        ("0.3333333333333333", "0.333333333333", True),
        ("0.3333333", "0.333333333333", True),
        ("0.33333", "0.333333333333", False),
        ("0.30000000000000004", "0.3", True),
        ("0.31", "0.3", False),
        ("12345678.90", "12345678.91", False),
        ("3.0000000000000004", "3", False),
        ("10000000000.9", "10000000000", False),
        ("1606938044258990275541962092341162602522202993782792835301376.0", "1" + "0" * 60, False),
        ("0.0000001", "0.0000002", False),
        ("0.00000014", "0.0000001", True),
        ("1.4e-7", "1e-07", False),
        ("3\n\n4", "3\n4", False),
        ("1_000", "1000", False),
        ("nan", "1.5", False),
        ("1e500", "1.5", False),
        ("1e99999", "1.5", False),
        ("", "", True),
    ],
)
def test_lines_are_compared_numerically(output: str, expected: str, same: bool) -> None:
    assert same_lines(output, expected) is same


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("0.42857142857142855", "0.4285714", True),
        ("3.1416", "3.14159265", True),
        ("2.9999999996", "3", True),
        ("3.001", "3", False),
        ("1000000001", "1000000000", False),
        ("-1000000001", "-1000000000", False),
        ("10000000000.9", "10000000000", False),
        ("3", "2.9999999", True),
        ("3\n\n4", "3\n4", True),
        ("4\n3", "3\n4", False),
        ("1 2 3", "3 2 1", False),
    ],
)
def test_numpy_comparison_keeps_integers_exact(output: str, expected: str, same: bool) -> None:
    assert same_lines(output, expected, close=(1e-5, 1e-8), counts_empty=False) is same


def test_words_and_verdicts_are_compared_without_case() -> None:
    assert same_lines("yes\nNO", "YES\nNo", verdicts=True)
    assert not same_lines("yes 1", "YES 1", verdicts=True)
    assert same_words("yes 1.000001\n2", "YES\n1.0 2", close=(0.0, 1e-5))
    assert not same_words("Abc", "abc", close=(0.0, 1e-5))
    assert not same_words("1 2", "1 2 3")
