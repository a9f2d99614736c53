from __future__ import annotations

from typing import Any

import pytest

from workers.evaluators.program_tests.output_comparison import same_output, same_value, tolerance_of


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
def test_outputs_are_compared_as_the_row_says(output: str, expected: str, compare: str, same: bool) -> None:
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
def test_values_are_compared_as_json_has_them(value: Any, expected: Any, same: bool) -> None:
    assert same_value(value, expected) is same


def test_a_row_may_allow_a_difference_from_an_integer_too() -> None:
    assert same_value(1.9999999, 2, 1e-6)
    assert not same_value(1000001, 1000000, 1e-6)


def test_a_value_that_is_too_deep_is_not_the_same() -> None:
    deep: Any = []
    for _ in range(1000):
        deep = [deep]
    assert not same_value(deep, deep)


@pytest.mark.parametrize("compare", ["exact", "float", "float:", "float:0", "float:2", "float:nan", ""])
def test_another_way_to_compare_is_refused(compare: str) -> None:
    with pytest.raises(ValueError, match="is no way to compare"):
        tolerance_of(compare)
