r"""Answers that leave an operation to their reader, and values in the notations that answers use."""

from __future__ import annotations

import pytest

from workers.evaluators.answers.notation import is_value, operations_left

LEFT = [
    *((r"1234\cdot5678", "7006652"), (r"\sum_{k=1}^{100}k", "5050"), (r"\binom{10}{3}", "120"), ("10!", "3628800")),
    *(("2^{100}", "1267650600228229401496703205376"), (r"\gcd(12,18)", "6"), (r"\sqrt{1764}", "42")),
    *((r"\log_2 1024", "10"), (r"\det\begin{pmatrix}1&2\\3&4\end{pmatrix}", "-2")),
    *((r"\lim_{x\to0}\frac{\sin x}{x}", "1"), (r"\int_0^1 2x dx", "1"), ("12+12", "24"), ("12 * 2", "24")),
    *(("48/2", "24"), (r"\frac{48}{2}", "24"), ("2(12)", "24"), ("(2)(12)", "24"), ("4!", "24"), ("2¹⁰", "1024")),
    *(("30-6", "24"), ("|{-24}|", "24"), (r"\lfloor 24.5\rfloor", "24"), ("lcm(8,6)", "24")),
    *(("1/2+1/3", r"\frac{5}{6}"), (r"2\cdot 3\cdot 10^{5}", "600000"), (r"\mathrm{gcd}(12,18)", "6")),
    *((r"\text{lcm}(8,6)", "24"), (r"\operatorname{lcm}(8,6)", "24"), ("max(3,24)", "24"), (r"100\bmod 76", "24")),
    *(("sqrt(576)", "24"), ("x = 12 + 12", "24"), (r"2 \times 12\text{ cm}", "24"), ("e^{0}", "1")),
    *((r"\frac{10!}{3!7!}", "120"), (r"\frac{1}{2}\cdot\frac{1}{3}", r"\frac16"), ("C(10,3)", "120")),
    *(("48 ÷ 2", "24"), ("2**10", "1024"), ("\u221212\u221212", "-24"), ("5-(-2)", "7")),
    *((r"{10 \choose 3}", "120"), ("7 mod 4", "3"), (r"\sin^2 x+\cos^2 x", "1")),
    *(("10^{2}+10^{2}", "200"), (r"3^{\circ}+4^{\circ}", "7")),
]
VALUES = [
    *(("24", "24"), ("-24", "-24"), (r"-\frac{5}{6}", r"-\frac{5}{6}"), ("24 cm", "24"), (r"24\text{ cm}^2", "24")),
    *(("24 cm^2", "24"), (r"24^\circ", "24"), (r"24^{\circ}", "24"), ("24°", "24"), ("12+12=24", "24")),
    *(("x=24", "24"), ("f(3)=24", "24"), ("x = 24", "24"), ("1/2", "0.5"), (r"\frac12", "0.5")),
    *((r"\frac{22}{7}", r"\frac{22}{7}"), ("22/7", r"\frac{22}{7}"), (r"1\frac{1}{2}", "1.5"), ("10^6", "1000000")),
    *((r"3\cdot 10^8", "300000000"), (r"3 \times 10^{8}", "300000000"), ("50%", "0.5"), (r"50\%", "0.5")),
    *(("1,000", "1000"), (r"24 \text{ (since } 4! = 24)", "24"), (r"\boxed{24}", "24"), ("$24$", "24")),
    *((r"\sqrt{2}\approx 1.41", "1.41"), ("24.", "24"), ("+24", "24"), (r"\$24", "24"), ("24 m/s", "24")),
    *((r"24\ \mathrm{m/s}", "24"), ("24 dollars", "24"), (r"0.\overline{3}", r"\frac13"), ("(24)", "24")),
    *((r"24\,\text{kg}\cdot\text{m}^2", "24"), (r"n = 24 \text{ divisors}", "24"), (r"2x=48 \implies x=24", "24")),
    *(("twenty-four", "24"), ("24 - ", "24"), ("6.4e-3", "0.0064"), (r"5 \text{ (not } 6)", "5"), ("1 : 2", "0.5")),
    *((r"\{24\}", "24"), (r"24 \text{ m}^{3}", "24"), (r"24~\text{units}", "24"), (r"24 \;\mathrm{cm}^{2}", "24")),
    *((r"\dfrac{3}{4}", "0.75"), (r"\text{24}", "24"), (r"\textbf{24}", "24"), (r"24 \text{ square units}", "24")),
    *((r"24 \text{ ft/s}^2", "24"), (r"\mathbf{24}", "24"), ("$24$ ways", "24")),
    *((r"1 \frac{1}{2}", "1.5"), (r"24 \text{ or so}", "24")),
]


@pytest.mark.parametrize(("answer", "gold"), LEFT)
def test_operation_missing_in_the_gold_answer_is_reported(answer: str, gold: str) -> None:
    assert operations_left(answer, gold)
    # operations in the gold answer itself may be left
    assert operations_left(answer, answer) == set()


@pytest.mark.parametrize(("answer", "gold"), VALUES)
def test_value_in_any_notation_leaves_no_operation(answer: str, gold: str) -> None:
    assert operations_left(answer, gold) == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("24", True), ("-0.5", True), ("5 kg", True), (r"\frac{5}{6}", True), (r"-\frac56", True), ("5/6", True)),
        *((r"1\frac12", True), ("x", False), (r"\sqrt{2}", False), ("2^{10}", False), (r"\pi", False)),
        ("(1, 2)", False),
    ],
)
def test_values_are_distinguished_from_expressions(text: str, expected: bool) -> None:
    assert is_value(text) is expected
