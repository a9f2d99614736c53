"""The two scores of a row whose form has a rule: the farm's stricter score, and the authors' score."""

from __future__ import annotations

from typing import Any

import pytest

from workers.evaluators.authors_score import AUTHORS, FARM, with_authors
from workers.evaluators.program_tests.form_rules import form_rule
from workers.plugins.interfaces import Score


@pytest.mark.parametrize(
    ("rule", "output", "expected", "farm", "authors"),
    [
        ("livecodebench", "1.5", "1.50", True, True),
        ("livecodebench", "0.3333333333333333", "0.333333333333", True, False),
        ("nemo_gym", "10000000000.9", "10000000000", False, True),
        ("nemo_gym", "yes", "YES", True, True),
        ("prime_code", "0.42857142857142855", "0.4285714", True, True),
        ("prime_code", "-1000000001", "-1000000000", False, True),
        ("prime_code", "1000000001", "1000000000", False, False),
        ("apps", "b a\n", "a b", False, True),
        ("apps", "1000000001", "1000000000", False, True),
        ("taco", "0.42857142857142855", "0.4285714", True, False),
        ("taco", "ba", "a b", False, True),
        ("taco", "aab", "ab b", False, False),
        ("taco", "12", "1\n2", False, True),
        ("codecontests", "9007199254740993", "9007199254740992", False, True),
        ("codecontests", "yes", "YES", True, True),
        ("codecontests", "aB", "Ab", False, True),
    ],
)
def test_outputs_have_two_scores(rule: str, output: str, expected: str, farm: bool, authors: bool) -> None:
    found = form_rule(rule)
    assert (found.farm_outputs(output, expected), found.outputs(output, expected)) == (farm, authors)


@pytest.mark.parametrize(
    ("rule", "value", "expected", "farm", "authors"),
    [
        ("livecodebench", (1, 2), [1, 2], True, True),
        ("livecodebench", [(1, 2)], [[1, 2]], True, False),
        ("livecodebench", 2.0**200, 2**200 + 12345, False, False),
        ("nemo_gym", [(1, 2)], [[1, 2]], True, True),
        ("nemo_gym", 1000000001.0, 1000000000, False, True),
        ("nemo_gym", "3.0", 3.0, False, True),
        ("prime_code", 5, [5], False, True),
        ("prime_code", 5, [5, 6], False, True),
        ("prime_code", {"a"}, ["a"], False, False),
        ("evalplus:mbpp:0.0", 0.3333333, 1 / 3, True, True),
        ("evalplus:mbpp:0.0", [10000000001], [10000000000], False, False),
        ("evalplus:mbpp:0.0001", [10000000001], [10000000000], False, True),
    ],
)
def test_values_have_two_scores(rule: str, value: Any, expected: Any, farm: bool, authors: bool) -> None:
    found = form_rule(rule, "f")
    assert (found.farm_values((), value, expected), found.values()((), value, expected)) == (farm, authors)


def test_evalplus_tolerance_applies_to_all_values_after_the_first_float() -> None:
    same = form_rule("evalplus:mbpp:0.0", "f").values()
    assert not same((), (1, 2.5), (1, 2.5000001))
    assert same((), 0.5, 0.5)
    assert same((), (1, 2.5), (1, 2.5000001))


@pytest.mark.parametrize(
    ("function", "arguments", "value", "expected", "right"),
    [
        ("similar_elements", (), [3, 1], (1, 3), True),
        ("similar_elements", (), [3], (1, 3), False),
        ("text_match_three", (), "found", True, True),
        ("text_match_three", (), None, True, False),
        ("sum_div", (7,), 0, 1, True),
        ("surface_Area", (3, 4), 35, 33, True),
        ("surface_Area", (3, 4), 34, 33, False),
        ("digit_distance_nums", (1, 23), 4, 0, True),
        ("are_equivalent", (1, 2), False, True, True),
        ("other", (), [3, 1], [1, 3], False),
    ],
)
def test_problems_of_mbpp_have_their_own_rules(
    function: str, arguments: tuple[Any, ...], value: Any, expected: Any, right: bool
) -> None:
    rule = form_rule("evalplus:mbpp:0.0", function)
    assert (rule.farm_values(arguments, value, expected), rule.values()(arguments, value, expected)) == (right, right)


def test_root_of_a_polynomial_is_accepted_if_its_value_is_small() -> None:
    rule = form_rule("evalplus:humaneval:0.0001", "find_zero")
    assert rule.values()(([1.0, 2.0],), -0.50001, None)
    assert not rule.values()(([1.0, 2.0],), -0.6, None)
    assert not rule.values()(([1.0, 2.0],), "x", None)


@pytest.mark.parametrize(
    ("rule", "passed", "n", "is_call", "more", "value"),
    [
        ("livecodebench", [True], 2, False, True, 0.0),
        ("livecodebench", [True, False], 3, False, False, 0.0),
        ("livecodebench", [True, True], 2, False, True, 1.0),
        ("prime_code", [True, False], 3, False, True, 1 / 3),
        ("prime_code", [True, False, True], 3, False, True, 2 / 3),
        ("prime_code", [True] * 10 + [False], 20, False, False, 1.0),
        ("prime_code", [True, False], 3, True, False, 0.0),
    ],
)
def test_authors_score_covers_all_tests_or_stops_at_the_first_failure(
    rule: str, passed: list[bool], n: int, is_call: bool, more: bool, value: float
) -> None:
    found = form_rule(rule)
    assert found.needs_more(passed, is_call) is more
    assert found.score(passed, n, is_call).value == pytest.approx(value)


def test_details_show_where_the_two_scores_differ() -> None:
    rule = form_rule("livecodebench")
    score = with_authors(Score(1.0, {"n_tests": 1}), rule.score([False], 1, False))
    assert score.rewards == {FARM: 1.0, AUTHORS: 0.0}
    assert score.details["differs"] is True
    assert "differs" not in with_authors(Score(0.0), rule.score([False], 1, False)).details
