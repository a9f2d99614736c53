from __future__ import annotations

import pytest

from workers.evaluators.answers.final_answer import FinalAnswer, chosen, closing_boxes, final_answer
from workers.evaluators.answers.normal_text import number_and_unit, same_words, whole_number, words

OPTIONS = ("10 m", "20 m", "30 m", "C")


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (r"so \boxed{12}.", "12"),
        (r"\boxed{13} no, \boxed{12}", "12"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{24}}", "{24}"),
        (r"\boxed{5,}", "5"),
        (r"\boxed{12} \boxed{13", ""),
        ("\\boxed{12 \nAnswer: 12", "12"),
        ("A part is \\boxed{7}.\nAnswer: 13", "13"),
        ("Answer: \\boxed{13}", "13"),
        ("\\boxed{7}\n<answer>13</answer>", "13"),
        ("<answer>\\boxed{13}</answer>", "13"),
        ("\u2705 Final Answer: **73**", "73"),
        ("Answer: `73`", "73"),
        ("Answer\uff1a 73", "73"),
        ("So $\\boxed 2 \\sqrt{3}$ it is.", "2 \\sqrt{3}"),
        ("\\boxed" + " " * 100_000 + "3", ""),
        (r"\fbox{7}", "7"),
        ("Answer: 12", "12"),
        ("**Answer:** $24$", "$24$"),
        ("Answer: 1\nAnswer: 2", "2"),
        ("Answer: 1\n\\boxed{2}", "2"),
        ("<answer>5</answer>", "5"),
        ("12", "12"),
        ("It is 12.\nSo be it.", ""),
        (r"<think>\boxed{3}</think> \boxed{4}", "4"),
        (r"<think>\boxed{3}", ""),
        (r"<think>\boxed{3}</think>", ""),
        ("", ""),
        (None, ""),
        ("<answer>1</answer><answer>2", "1"),
        ("<answer>1</answer>2</answer>", "1"),
        ("<answer>1<answer>2</answer>", "1<answer>2"),
        ("\\boxed{" * 130_000, ""),
        ("\\boxed" + " " * 1_000_000, ""),
        ("{" * 1_000_000 + "\\boxed{3}", "3"),
        ("<answer>" * 130_000, ""),
        ("Answer:" + "*" * 1_000_000, ""),
        ("answer " * 150_000 + "\n", ""),
        ("\\boxed{" + "9" * 30_000 + "}", ""),
    ],
)
def test_final_answer_is_extracted_from_a_response(response: str | None, text: str) -> None:
    assert final_answer(response).text == text


@pytest.mark.parametrize(
    ("response", "boxes"),
    [
        (r"the roots are \boxed{2} and \boxed{3}.", ["2", "3"]),
        (r"$\boxed{2}$, $\boxed{3}$", ["2", "3"]),
        (r"\boxed{1} is a part. \boxed{2} or \boxed{3}", ["2", "3"]),
        (r"\boxed{\boxed{2}}", [r"\boxed{2}"]),
        (r"\boxed{2} or rather \boxed{3}", ["3"]),
        ("none", []),
        ("\\boxed{" * 100_000, []),
    ],
)
def test_adjacent_boxes_are_found(response: str, boxes: list[str]) -> None:
    assert closing_boxes(response) == boxes


def test_pattern_of_a_row_replaces_the_other_rules() -> None:
    pattern = r"The answer is \(?([A-J])\)?"
    assert final_answer(r"The answer is (A). The answer is (B). \boxed{C}", pattern) == FinalAnswer("B", True)
    assert final_answer(r"\boxed{C}", pattern) == FinalAnswer()


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        (r"\text{B}", "B"),
        ("Option B", "B"),
        ("B: 20 m", "B"),
        ("20 m", "B"),
        ("C", "D"),  # the text of an option takes precedence, if there is one
        ("B: 10 m", ""),
        ("A, B, C", ""),
        ("A and B", ""),
        ("E", ""),
        ("20", ""),
        ("all of them", ""),
        ("A B C D", ""),
    ],
)
def test_option_is_named_by_its_letter_or_its_text(answer: str, letter: str) -> None:
    assert chosen(answer, OPTIONS)[0] == letter


def test_options_that_differ_only_in_case_are_distinguished() -> None:
    options = ["5 mW", "5 MW", "10 kg"]
    assert [chosen(answer, options)[0] for answer in ("5 mW", "5 MW", "5 mw", "10 KG", "C. 10 KG")] == [
        *("A", "B", "", "C", "C"),
    ]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("20 m", (20.0, "m")),
        (r"20\,\text{m}", (20.0, "m")),
        ("5e14 Hz", (5e14, "Hz")),
        (r"5 \times 10^{14}\ \text{Hz}", (5e14, "Hz")),
        ("3 m/s^2", (3.0, "m/s2")),
        ("1{,}000{,}000", (1e6, "")),
        ("-0.5", (-0.5, "")),
        ("3 N", (3.0, "N")),
        (r"3 N\cdot m", (3.0, "N·m")),
        ("2 k", None),
        ("2 or3", None),
        ("2 or 3", None),
        ("24!", None),
        (r"24 \lor 3", None),
        ("23, 24", None),
        ("1,2", None),
        ("9^9", None),
        ("x", None),
    ],
)
def test_number_and_unit_are_parsed(text: str, number: tuple[float, str] | None) -> None:
    assert number_and_unit(text) == number


def test_words_are_compared_without_articles_case_and_typesetting() -> None:
    assert words(r"\text{The Mitochondrion}.") == words("mitochondrion") == "mitochondrion"


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("U.S.", "us", True),
        ("the Beatles", "Beatles", True),
        ("Jean-Paul", "JeanPaul", True),
        ("1,000", "1000", True),
        ("Dr. No (film)", "dr no film", True),
        ("5 HT", "5-HT", True),
        ("1.5", "15", False),
        ("1990-91", "199091", False),
        ("1990s", "1990", False),
        ("-5", "5", False),
        ("5%", "5", False),
        ("5 mW", "5 MW", False),
        ("M", "m", False),
        ("2X+x", "2x+X", False),
    ],
)
def test_words_are_equal_whatever_separates_them(one: str, other: str, same: bool) -> None:
    assert same_words(one, other) is same


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1000000007", 1000000007),
        ("1,000 m", 1000),
        ("-5", -5),
        ("+5 apples", 5),
        ("5.0", 5),
        ("1000000008.", 1000000008),
        ("1000000008.00 m", 1000000008),
        ("5.5", None),
        ("1.0.0", None),
        ("5e3", None),
        ("5 \\times 10^3", None),
        ("2^200", None),
        ("1/2", None),
        ("five", None),
    ],
)
def test_whole_numbers(text: str, number: int | None) -> None:
    assert whole_number(text) == number
