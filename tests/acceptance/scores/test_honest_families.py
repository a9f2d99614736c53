"""The reference answers of reasoning-gym's families score 1, however they are phrased."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.answers.conftest import entry, graded, score
from workers.plugins.interfaces import Score

__all__ = ["graded", "score"]

FAMILIES = (
    *("chain_sum", "gcd", "lcm", "prime_factorization", "fraction_simplification", "basic_arithmetic", "leg_counting"),
    *("decimal_arithmetic", "decimal_chain_sum", "number_format", "power_function", "products", "time_intervals"),
    *("calendar_arithmetic", "dice", "polynomial_multiplication", "simple_equations", "complex_arithmetic"),
    *("base_conversion", "binary_alternation", "caesar_cipher", "count_bits", "count_primes", "cryptarithm"),
    *("group_anagrams", "isomorphic_strings", "letter_counting", "letter_jumble", "number_filtering", "number_sorting"),
    *("palindrome_generation", "pool_matrix", "ransom_note", "rotate_matrix", "sentence_reordering", "spell_backward"),
    *("spiral_matrix", "string_insertion", "word_sorting", "number_sequence", "aiw", "knights_knaves", "syllogism"),
    *("family_relationships", "color_cube_rotation", "needle_haystack", "simple_geometry", "advanced_geometry"),
)
WAYS = (
    "<answer>{}</answer>",
    "I get <answer>\n  {}  \n</answer>. That is all.",
    "<answer>7</answer> is wrong; it is <answer>{}</answer>",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_reference_answers_score_one(score: Callable[..., Score], family: str) -> None:
    problem: dict[str, Any] = entry(family)
    wrong = {way: score(family, way.format(problem["answer"])).value for way in WAYS}
    assert {way: value for way, value in wrong.items() if value != 1.0} == {}


def test_enough_families_are_covered() -> None:
    assert len(FAMILIES) >= 40
