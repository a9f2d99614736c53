"""Right turns in unusual forms: texts for the guessing game, and answers that the node's grader verifies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GUESS = "<guess>1</guess>"
"""The right guess if the number is from 1 to 1."""
TEXTS: Mapping[str, Sequence[str]] = {
    "alone": [GUESS],
    "after_a_wrong_one": [f"Is it <guess>9</guess>? No: {GUESS}"],
    "zeros_before": ["<guess>0001</guess>"],
    "in_a_fence": [f"```xml\n{GUESS}\n```"],
    "line_ends_of_windows": [f"\r\n{GUESS}\r\n"],
    "long_thoughts_before": ["well, " * 100_000 + GUESS],
    "long_thoughts_after": [GUESS + " I think" * 100_000],
    "other_letters": [f"Ich rate größer \u6570\u5b57 \U0001f600 {GUESS}"],
    "right_to_left": [f"\u202b\u05d0\u05d1 {GUESS}\u202c"],
    "NUL": [f"\0{GUESS}\0"],
    "half_a_surrogate": [f"\ud800{GUESS}"],
    "line_separators": [f"\u2028{GUESS}\u2029\x85"],
    "JSON_around": [f'{{"answer": "{GUESS}"}}\n{{"reply": 1}}'],
    "tags_around": [f"<answer><think>{GUESS}</think></answer>"],
    "a_tag_in_a_tag": [f"<guess>{GUESS}</guess>"],
    "tags_of_a_template": [f"<|im_start|>assistant\n{GUESS}<|im_end|>"],
    "nothing_at_first": ["", GUESS],
    "a_question_at_first": ["What is the highest number?", "<guess>one</guess>", GUESS],
}
"""The texts of the turns; only the last one has a reward, 1."""


def _problem(family: str, answer: str, **metadata: Any) -> dict[str, Any]:
    return {"family": family, "entry": {"question": "", "answer": answer, "metadata": metadata}}


_MATRIX = [list("*OO"), list("OOO"), list("OO#")]
PROBLEMS: Mapping[str, tuple[dict[str, Any], Sequence[str]]] = {
    "decimal": (
        _problem("decimal_arithmetic", "0.5"),
        ("0.50", "5e-1", "5E-1", " .5\n", "+0.5", "0.500000000000000000000001"),
    ),
    "number": (
        _problem("number_format", "1234567", solution=1234567.0),
        ("1,234,567", "1234567.000", "1.234567e6", "\t1234567\n", "+1_234_567"),
    ),
    "power": (_problem("power_function", "1.23e6"), ("1.23E+6", "1230000", "1230000.00", "1229999.9")),
    "complex": (
        _problem("complex_arithmetic", "1 + 2i", result=[1, 2]),
        ("1+2i", "1 + 2j", "(1 + 2i)", "1.0 + 2.0i", "1+2I"),
    ),
    "fraction": (
        _problem(
            "fraction_simplification",
            "3/4",
            numerator=6,
            denominator=8,
            simplified_numerator=3,
            simplified_denominator=4,
        ),
        ("3/4", "3 / 4", "$3/4$", "\\frac{3}{4}", "$\\dfrac{ 3 }{ 4 }$"),
    ),
    "integral": (
        _problem("simple_integration", "x**2 + C", integrand="2*x", variable="x"),
        ("C + x*x", "x**2", "(x + 1)**2 - 2*x + C", "x**2 + 5 - C", "2*x**2/2 + C", "x**2 + C + log(2)"),
    ),
    "countdown": (
        _problem("countdown", "2*3 + 4", numbers=[2, 3, 4], target=10, expression="2*3 + 4"),
        ("4 + 3*2", "(2*3)+4", "((4)) + (3 * 2)", "4-(-3)*2", "2*3--4"),
    ),
    "puzzle24": (_problem("puzzle24", "4*3*2*1", numbers=[1, 2, 3, 4]), ("(1+2+3)*4", " 4 * (1 + 2 + 3)\n", "4*3*2/1")),
    "queens": (
        _problem("n_queens", "Q _\n_ Q", valid_answers=["Q _\n_ Q", "_ Q\nQ _"], solutions=[]),
        ("_ Q\nQ _",),
    ),
    "anagrams": (
        _problem("group_anagrams", '[["ab", "ba"], ["c"]]', solution=[["ab", "ba"], ["c"]]),
        ('[["c"],["ba","ab"]]', '[ [ "\\u0063" ],\n ["ab", "ba"] ]'),
    ),
    "path": (
        _problem("shortest_path", "right right down down", matrix=_MATRIX),
        ("down down right right", "down right  down\nright"),
    ),
    "lock": (
        _problem("quantum_lock", "A \u2192 B \u2192 C", target_value=1),
        ("a b c", "A, B, C", "[A] -> [B] -> [C]"),
    ),
    "star": (_problem("path_star", "1 2 3"), ("1  2\n3 ",)),
    "family": (_problem("family_relationships", "mother"), ("Mother", " MOTHER\n")),
    "equation": (_problem("polynomial_equations", "-2.0, 2.0"), ("2, -2", "+2.000,-2", "2e0 , -2")),
}
"""Problems with right answers to them."""
