r"""Answers in the form that each rule of `workers/evaluators/answers/authors` asks for, and in others, right and wrong.

A case is generated: a gold answer, an answer that is equal to it or is not, and a response that ends with it in some
form. Its correctness is known from its generation, not from a scorer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

N_CASES = 400
"""For a rule."""
OPTIONS = ("10 m", "20 m", "30 meters", "E. coli", "none of the above")
_LONG = "That is what was to be shown, and it is checked once more below. " * 6


@dataclass(frozen=True, slots=True)
class AnswerCase:
    """A response to a row of a rule; `right` says if its final answer is a gold one, None if that is debatable."""

    rule: str
    response: str
    golds: tuple[str, ...]
    options: tuple[str, ...] = ()
    pattern: str = ""
    other_patterns: tuple[str, ...] = ()
    prefix: str = ""
    right: bool | None = None
    row: Mapping[str, Any] | None = None
    """A row of slime with `rm_type`, `label` and `metadata`, from which golds and options are made."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Gold answers, and texts that equal one, that equal none, and that are debatable."""

    golds: tuple[str, ...]
    equal: Sequence[str]
    other: Sequence[str]
    arguable: Sequence[str] = ()


NUMBERS = (
    Drawn(
        ("72",), ("72", "72.", "72.0", "+72", " 72", "$72", "72 apples", "072"), ("71", "720", "7", "-72", "27", "7.2")
    ),
    Drawn(
        ("1000",), ("1000", "1,000", "1000.", "$1,000", "1,000 dollars"), ("100", "10,00", "1001", "1.000.1", "10000")
    ),
    Drawn(("-5",), ("-5", "-5.0", "-5."), ("5", "-50", "- 55", "5-")),
    Drawn(("0",), ("0", "0.0", "0."), ("1", "10", "00.1", "-1", "o")),
    Drawn(("1000000007",), ("1000000007", "1,000,000,007"), ("1000000008", "1000000006", "100000000")),
    Drawn(("12.5",), ("12.5", "12.50", "$12.50"), ("12", "125", "13", "12.4"), ("12.5%",)),
)
MATHS = (
    Drawn(
        ("\\frac{1}{2}",),
        (
            "\\frac{1}{2}",
            "\\frac12",
            "\\dfrac{1}{2}",
            "1/2",
            "0.5",
            "\\tfrac{1}{2}",
            "$\\frac{1}{2}$",
            "x=\\frac{1}{2}",
        ),
        ("\\frac{2}{1}", "2", "\\frac{1}{3}", "\\frac{1}{2}x", "5", "\\frac{12}{1}"),
    ),
    Drawn(("2\\sqrt{3}",), ("2\\sqrt{3}", "2\\sqrt3", "2 \\sqrt{3}"), ("\\sqrt{3}", "3\\sqrt{2}", "2\\sqrt{33}")),
    Drawn(("(1,2)",), ("(1,2)", "(1, 2)", "\\left(1,2\\right)", "(1,\\ 2)"), ("(2,1)", "[1,2]", "(1,2,3)", "(1,-2)")),
    Drawn(
        ("10",), ("10", "10 \\text{ cm}", "10\\text{ units}", "10.0", "x=10"), ("100", "1", "-10", "10^2"), ("10\\%",)
    ),
    Drawn(
        ("5 \\text{ km}",),
        ("5 \\text{ km}", "5\\text{ km}"),
        ("6 \\text{ km}", "50 \\text{ km}"),
        ("5", "5 \\text{ cm}"),
    ),
    Drawn(("x^2+1",), ("x^2+1", "x^2 + 1", "1+x^2"), ("x^2-1", "x+1", "X^2+1", "x^2"), ("y=x^2+1",)),
    Drawn(("90^\\circ",), ("90^\\circ", "90^{\\circ}"), ("9^\\circ", "60^\\circ"), ("90",)),
    Drawn(("\\text{even}",), ("\\text{even}", "even", "Even"), ("odd", "\\text{odd}", "evenly"), ()),
    Drawn((".5",), (".5", "0.5", "\\frac{1}{2}"), ("5", "0.05", ".55")),
    Drawn(
        ("34",), ("34", "$34$", "\\boxed{34}", "**34**", "34."), ("43", "3", "340", "34x", "3,4"), ("24=34", "33 or 34")
    ),
)
FACTS = (
    Drawn(
        ("Barack Obama", "Obama", "Barack Hussein Obama"),
        ("Barack Obama", "obama", "OBAMA.", "the Obama", "Barack Hussein Obama", '"Barack Obama"'),
        ("Michelle Obama", "Barack", "Obama and Biden", "not Obama"),
    ),
    Drawn(("U.S.", "United States"), ("US", "u.s.", "the United States", "U.S"), ("UK", "U.S.S.R.", "United Kingdom")),
    Drawn(("1990",), ("1990", " 1990 ", "1990."), ("1991", "19901", "1990s", "1990 or 1991"), ("1,990",)),
    Drawn(("1.5 million",), ("1.5 million", "1.5 Million"), ("1.5", "2.5 million"), ("15 million",)),
    Drawn(("rock 'n' roll",), ("rock n roll", "Rock 'n' Roll", "rock 'n' roll"), ("rock", "roll n rock", "rock n")),
    Drawn(("-40",), ("-40", "-40."), ("-4", "400"), ("40",)),
    Drawn(("The Hague",), ("The Hague", "Hague", "the hague", "the Hague!"), ("Hague Convention", "Amsterdam")),
    Drawn(("3.14",), ("3.14",), ("3", "3.15"), ("314",)),
)
MARKS = {
    "####": (
        *("#### {}", "So it is.\n#### {}", "#### 9\nNo.\n#### {}", "#### {}\n", "#### {}\nThat is all.", "####  {}"),
        *(
            "####{}",
            "### {}",
            "First.\n#### Step 1\nthen\n#### {}",
            "\\boxed{{{}}}",
            "Answer: {}",
            "The answer is {}",
            "{}",
        ),
        *(_LONG + "#### {}", "#### {}\n" + _LONG, "It is {} of 9 in all."),
    ),
    "line": (
        *("Answer: {}", "Answer:{}", "answer : {}", "So.\nAnswer: {}", "Answer: 9\nAnswer: {}", "**Answer:** {}"),
        *("The answer is {}", "Answer: {}\nThat is all.", "\\boxed{{{}}}", "\\boxed{{9}}\nAnswer: {}", "{}"),
        *(
            _LONG + "Answer: {}",
            "Answer: {}\n" + _LONG,
            "Answer: <{}>",
            "Final Answer: {}",
            "Answer:\n{}",
            "Answer: {} <end>",
        ),
        *("Answer: ${}$", "Answer: \\boxed{{{}}}"),
    ),
    "box": (
        *("\\boxed{{{}}}", "So \\boxed{{{}}}.", "\\boxed{{9}} no, \\boxed{{{}}}", "$\\boxed{{{}}}$", "\\fbox{{{}}}"),
        *("\\boxed {}$", "$\\boxed {}$ is it", "\\boxed{{{}", "Answer: {}", "{}", "\\boxed{{{}}} \\boxed{{"),
        *("\\boxed{{\\boxed{{{}}}}}", _LONG + "\\boxed{{{}}}", "\\boxed{{{}}} " + _LONG, "\\boxed{{x = {}}}"),
    ),
    "text": (
        *("\\boxed{{{}}}", "\\boxed{{\\text{{{}}}}}", "Final answer: {}", "final answer : {}."),
        *("Answer: {}", "answer\uff1a{}"),
        *("{}", "So.\n{}\n\n", '"{}"', "'{}'", "{}!", "Answer: \\boxed{{{}}}", "\\boxed{{{}", "\\boxed{{9}} {}"),
        *("Final answer: 9\nFinal answer: {}", "\\textbf{{{}}}", "${}$", "\\({}\\)", "{} and {}"),
    ),
    "tag": (
        *("<answer>{}</answer>", "<answer> {} </answer>", "<answer>9</answer> no <answer>{}</answer>", "<answer>{}"),
        *("<think>so</think><answer>{}</answer>", "<answer>\n{}\n</answer>", "{}", "Answer: {}", "<Answer>{}</Answer>"),
        *(
            "<answer><answer>{}</answer></answer>",
            "<answer>9</answer>" * 11 + "<answer>{}</answer>",
            "<answer></answer>{}",
        ),
    ),
}
_RESPONSES: Mapping[str, tuple[Sequence[Drawn], str]] = {
    "gsm8k": (NUMBERS, "####"),
    "skyrl_gsm8k": (NUMBERS, "####"),
    "gsm8k_flexible": (NUMBERS, "####"),
    "dapo": ((*MATHS, *NUMBERS), "line"),
    "skyrl_aime": ((*MATHS, *NUMBERS), "line"),
    "hendrycks_math": ((*MATHS, *NUMBERS), "box"),
    "math_verify": ((*MATHS, *NUMBERS), "box"),
    "search_r1": (FACTS, "tag"),
    "skyrl_search": (FACTS, "tag"),
}
_WITH_UNIT = ("1990s",)
_TEXT_RULES = tuple(
    f"string_match_{mode}{suffix}"
    for mode in ("boxed", "final_answer", "last_line", "full_response")
    for suffix in ("", "_exact")
)
_CHOICES = (
    *("\\boxed{{{letter}}}", "\\boxed{{\\text{{{letter}}}}}", "\\boxed{{({letter})}}", "\\boxed{{{letter}: {text}}}"),
    *(
        "\\boxed{{{text}}}",
        "\\boxed{{ {letter} }}",
        "\\boxed{{{letter}. {text}}}",
        "Answer: {letter}",
        "Answer: {text}",
    ),
    *(
        "**Answer:** {letter}",
        "**Answer**: **{letter}**",
        "Answer: ({letter})",
        "answer: \\text{{{letter}}}",
        "{letter}",
    ),
    *(
        "The answer is {letter}",
        "\\boxed{{{letter}",
        "\\boxed{{A}} or \\boxed{{{letter}}}",
        "Answer: {letter}.",
        "{text}",
    ),
    *("Answer: {letter} because", "\\boxed{{{lower}}}", "\\boxed{{[{letter}]}}", "Answer: {letter} or {other}"),
    *("\\boxed{{{letter}{other}}}", "\\boxed{{{letter}) {other_text}}}", "Answer: {letter}/{other}", "Answer: Z"),
    *("Answer: \uff22", "\uff21nswer: {letter}", "Answer:\u3000{letter}"),
    *("\\boxed{{not {text}}}", "<choice>{letter}</choice>", "I choose {letter}.\nAnswer: {letter}"),
)
_ARGUABLE = frozenset(
    {"Answer: {letter} or {other}", "\\boxed{{{letter}{other}}}", "\\boxed{{{letter}) {other_text}}}", "Answer: Z"}
    | {
        "Answer: \uff22",
        "\uff21nswer: {letter}",
        "Answer:\u3000{letter}",
        "Answer: {letter}/{other}",
        "\\boxed{{not {text}}}",
    }
)
MODES = (
    *("strict_single_letter_boxed", "lenient_boxed", "lenient_answer_colon", "lenient_answer_colon_md", "gpqa_diamond"),
)
UNCLOSED = ("\\boxed{{{}", "\\boxed{{{}}} \\boxed{{", "<answer>{}", "<answer></answer>{}", "\\boxed{{{letter}")
_NO_ANSWER_OF_ITS_OWN = (
    "It is {} of 9 in all.",
    "Answer: <{}>",
    "Answer: {} <end>",
    "<answer><answer>{}</answer></answer>",
)
LIBRARY = "math_verify"
RULES = (*(rule for rule in (*_RESPONSES, *MODES) if rule != LIBRARY), *_TEXT_RULES)
_N_OF_LIBRARY = 300


def answer_cases(rule: str) -> list[AnswerCase]:
    """Return the cases of a rule, generated with its name as the seed."""
    random = Random(rule)
    draw = _choice_case if rule in MODES else _case
    return [draw(rule, random) for _ in range(_N_OF_LIBRARY if rule == LIBRARY else N_CASES)]


def _case(rule: str, random: Random) -> AnswerCase:
    groups, marks = _RESPONSES.get(rule) or ((*MATHS, *NUMBERS, *FACTS), "text")
    drawn = random.choice(groups)
    kind = random.choice(("equal", "equal", "other", "other", "arguable"))
    answers = getattr(drawn, kind) or drawn.other
    right = {"equal": True, "other": False}.get(kind if getattr(drawn, kind) else "other")
    form = random.choice(MARKS[marks])
    if form in (*UNCLOSED, *_NO_ANSWER_OF_ITS_OWN):
        right = None
    answer = random.choice(answers)
    if rule in _TEXT_RULES and (form == "{}!" or answer in _WITH_UNIT):
        # it may be a factorial; a letter that is a unit counts as one
        right = None
    return AnswerCase(rule, form.format(*[answer] * form.count("{}")), drawn.golds, right=right)


def _choice_case(rule: str, random: Random) -> AnswerCase:
    at, gold = random.randrange(len(OPTIONS)), random.randrange(len(OPTIONS))
    gold = at if random.random() < 0.5 else gold
    other = (at + 1) % len(OPTIONS)
    form = random.choice(_CHOICES)
    letters = "ABCDE"
    response = form.format(
        letter=letters[at], lower=letters[at].lower(), text=OPTIONS[at], other=letters[other], other_text=OPTIONS[other]
    )
    pattern = random.choice(("", "", "", r"<choice>\s*([A-Z])\s*</choice>", r"I choose (\w)"))
    right = None if form in (*_ARGUABLE, *UNCLOSED) else at == gold
    return AnswerCase(rule, response, (letters[gold],), OPTIONS, pattern, right=right)


_PREFIXES = ("Final choice:", "My pick is", "\u0989\u09a4\u09cd\u09a4\u09b0:", "\uff21\uff2e\uff33 -", "Answer:", "")
_PREFIXED = (
    *("{prefix} {letter}", "So.\n{prefix} ({letter})\nThat is all.", "{prefix}{letter}", "{prefix}\n{letter}"),
    *("{prefix} {other}\n{prefix} {letter}", "Answer: {other}\n{prefix} **{letter}**", "{prefix} {letter} or {other}"),
    *("{prefix} {letter}\nAnswer: {letter}", "{prefix} {text}", "{prefix} \\boxed{{{letter}}}", "\\boxed{{{letter}}}"),
    *(
        "<choice>{letter}</choice>",
        "I choose {letter}",
        "pick={letter}",
        "pick={text}",
        "pick={other} I choose {letter}",
    ),
)
_LISTS: tuple[tuple[str, ...], ...] = (
    *((), (), (r"<choice>\s*([A-Z])\s*</choice>", r"I choose (\w)")),
    *((r"pick=(.+)", r"I choose (\w)"), (r"I choose (\w)", r"pick=(.+)", r"(Z)$"), (r"pick=(\d)",)),
)


def template_cases() -> list[AnswerCase]:
    """Return cases of rows of NeMo Gym's `mcqa` with a prefix of answers, and with several patterns."""
    random = Random("templates")
    return [_template_case(random) for _ in range(N_CASES)]


def _template_case(random: Random) -> AnswerCase:
    mode = random.choice((*MODES[:4], "lenient_answer_colon_md", "lenient_answer_colon_md"))
    at, gold = random.randrange(len(OPTIONS)), random.randrange(len(OPTIONS))
    gold = at if random.random() < 0.5 else gold
    prefix, patterns = random.choice(_PREFIXES), random.choice(_LISTS)
    other = (at + 1) % len(OPTIONS)
    shown = random.choice((prefix, prefix, prefix.lower(), "Final choice:"))
    response = random.choice((*_PREFIXED, *_PREFIXED, *_CHOICES)).format(
        prefix=shown,
        letter="ABCDE"[at],
        lower="abcde"[at],
        text=OPTIONS[at],
        other="ABCDE"[other],
        other_text=OPTIONS[other],
    )
    first, *others = patterns or ("",)
    return AnswerCase(mode, response, ("ABCDE"[gold],), OPTIONS, first, other_patterns=tuple(others), prefix=prefix)
