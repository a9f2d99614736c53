"""Rows of slime and responses to them, in the form that the rule of a row's `rm_type` asks for, and in others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from tests.oracles.cases.answer_cases import FACTS, MARKS, MATHS, N_CASES, NUMBERS, OPTIONS, UNCLOSED, AnswerCase, Drawn

_YES_OR_NO = (
    Drawn(("yes",), ("yes", "Yes.", "YES!"), ("no", "yes it is not", "noanswer")),
    Drawn(("no answer",), ("no answer", "No answer."), ("no", "answer yes", "answers")),
    Drawn(("noanswer",), ("noanswer", "Noanswer."), ("no", "none")),
)
_WHOLE = Drawn(("12.5",), ("12.5",), ("13", "-12"), ("12",))
_INTEGERS = tuple(each for each in (*NUMBERS, *MATHS) if each.golds[0].lstrip("-").isdigit())
_OVERLAPS = (
    *("{}", "{}", "{}.", "The answer is {}.", "It is {}, which is known, and a city.", "<answer>{}</answer>", ""),
    *("{} {}", "So.\n{}", "the the {}", "\\boxed{{{}}}", "an {}", "{} or not", "\u00e9{}"),
)
_BOXES = ("\\boxed{{{}}}", "So \\boxed{{{}}}.", "\\boxed{{9}} no, \\boxed{{{}}}", "\\boxed{{{}", "{}", "\\boxed {}")
_LINES = (*MARKS["line"], "Answer: {}<|im_end|>", "Answer: {}<|endoftext|>", "Answer: {} <|im_end|>")
_NO_ANSWER = ("", "I do not know.", "Both may be right.", "Answer", "the answer is", "option   :   ")
_CHOICES = (
    *(
        "Answer: {letter}",
        "The answer is {letter}.",
        "answer {letter}",
        "Option {letter}",
        "choice:{letter}",
        "{letter}",
    ),
    *(
        "{letter} is correct",
        "{letter} is the correct option",
        "The final answer is {letter}",
        "final option: {letter}",
    ),
    *("The correct answer is ({letter})", "**Answer: {letter}**", "\\boxed{{{letter}}}", "I pick {letter}."),
    *("<think>Option {other} is correct.</think>Answer: {letter}", "<think>Answer: {letter}</think>", "{lower}"),
    *(
        "{text}",
        "It is {text}.",
        "The answer is {text}",
        "{letter}: {text}",
        "Z or {letter}",
        "answer: Z. But {letter}",
    ),
    *("The answer isn't {other}, but {letter}", "Is {letter} right?", "answer  is   {letter}", "{letter} {other}"),
    *("It is correct: {letter}", "final  answer\n{letter}", "\u212a answer: {letter}", "answer: \u017f {letter}"),
)
_PLAIN_CHOICES = (
    "Answer: {letter}",
    "The answer is {letter}.",
    "\\boxed{{{letter}}}",
    "{letter}",
    "**Answer: {letter}**",
)
_BOXED_CHOICES = (
    "\\boxed{{{letter}}}",
    "\\boxed{{Answer: {letter}}}",
    "\\boxed{{{text}}}",
    "{letter}",
    "\\boxed{{{letter}",
)
SLIME_RULES = tuple(f"slime_{boxed}{name}" for name in ("f1", "gpqa", "dapo") for boxed in ("", "boxed_"))
SYMPY_RULES = ("slime_math", "slime_deepscaler")
EXPRESSIONS = (
    *MATHS,
    *NUMBERS,
    Drawn(("\\sqrt{8}",), ("\\sqrt{8}", "2\\sqrt{2}", "\\sqrt 8", "2\\sqrt2"), ("\\sqrt{2}", "8", "\\sqrt[3]{8}")),
    Drawn(
        ("3\\frac{1}{2}",), ("3\\frac{1}{2}", "3 1/2", "3.5", "\\frac{7}{2}", "7/2"), ("3/2", "31/2", "\\frac{3}{2}")
    ),
    Drawn(("\\frac{\\pi}{2}",), ("\\frac{\\pi}{2}", "\\pi/2", "\\frac\\pi2", "0.5\\pi"), ("\\pi", "2\\pi", "1.57")),
    Drawn(
        ("[0,\\infty)",),
        ("[0,\\infty)", "\\left[0,\\infty\\right)", "[0, \\infty)"),
        ("(0,\\infty)", "[0,1)", "[0,\\infty]"),
    ),
    Drawn(("2x+3",), ("2x+3", "3+2x", "2\\cdot x+3", "2 \\times x + 3"), ("2x-3", "2x", "3x+2", "2y+3")),
    Drawn(("(x+1)^2",), ("(x+1)^2", "x^2+2x+1", "\\left(x+1\\right)^2"), ("x^2+1", "(x-1)^2"), ("(x+1)^{2}",)),
    Drawn(("\\theta",), ("\\theta", "\u03b8"), ("\\phi", "t", "\\Theta_1")),
    Drawn(("x \\le 2",), ("x \\le 2", "x \\leq 2", "x\u22642"), ("x < 2", "x \\ge 2", "x \\neq 2")),
    Drawn(("3 million",), ("3 million", "3000000", "3,000,000"), ("3", "300000")),
    Drawn(("2 hours",), ("2 hours", "2", "2\\text{ hours}", "2 hour"), ("20", "3 hours"), ("2 minutes",)),
    Drawn(("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}",), ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}",), ("1",)),
    Drawn(("\\boxed{7}",), ("7", "7.0"), ("8", "-7"), ("7\\%",)),
    Drawn(("0.25",), ("0.25", ".25", "1/4", "\\frac14"), ("0.26", "25"), ("25\\%",)),
    Drawn(("\\mathbf{v}",), ("\\mathbf{v}",), ("\\mathbf{y}",), ("v", "\\mathbb{v}")),
    Drawn(("\\overline{AB}",), ("\\overline{AB}", "AB"), ("\\overline{AC}",), ("\\hat{AB}", "\\bar{AB}")),
    Drawn(("2^{10}",), ("2^{10}",), ("2^{11}",), ("1024", "2^10")),
    Drawn(("\\ln 2",), ("\\ln 2", "\\ln2", "ln(2)"), ("\\ln 3", "2"), ("\\log 2", "\\ln{(2)}")),
    Drawn(("6",), ("6", "3!", "\\frac{12}{2}", "2\\cdot3", "|-6|"), ("5", "4!"), ("\\mbox{6}", "\\text{6 }", "x=6")),
    Drawn(("A",), ("A", "\\text{A}", "(A)", "\\mathrm{A}"), ("B", "\\text{B}"), ("a",)),
    Drawn(("1,2",), ("1,2", "1, 2"), ("1,3", "2"), ("1 and 2", "2,1", "12", "\\{1,2\\}")),
)
_THOUGHTS = (
    "<think>so</think>{}",
    "{}",
    "###Response{}",
    "<think>\\boxed{{9}}</think>{}",
    "a</think>b</think>{}",
    "{}</think>",
)
_FORMS: Mapping[str, tuple[Sequence[Drawn], Sequence[str]]] = {
    "slime_f1": ((*FACTS, *_YES_OR_NO), _OVERLAPS),
    "slime_boxed_f1": ((*FACTS, *_YES_OR_NO), _BOXES),
    "slime_dapo": ((*_INTEGERS, *NUMBERS, _WHOLE), _LINES),
    "slime_boxed_dapo": (
        (*_INTEGERS, _WHOLE),
        (
            "\\boxed{{Answer: {}}}",
            "\\boxed{{{}}}",
            "Answer: {}",
            "\\boxed{{Answer:{}}} so",
            "Answer: 1\\boxed{{answer: {}}}",
        ),
    ),
}


def slime_cases(rule: str) -> list[AnswerCase]:
    """Return the cases of a rule, generated with its name as the seed."""
    random = Random(rule)
    draw = _choice_case if rule.endswith("gpqa") else _expression_case if rule in SYMPY_RULES else _case
    return [draw(rule, random) for _ in range(N_CASES)]


def _row(rule: str, random: Random, label: Any, metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    name = rule.removeprefix("slime_")
    if random.random() < 0.5:
        return {"rm_type": name, "label": label, "metadata": metadata}
    return {"rm_type": "random", "label": label, "metadata": {**metadata, "rm_type": name}}


def _case(rule: str, random: Random) -> AnswerCase:
    groups, forms = _FORMS[rule]
    drawn, form = random.choice(groups), random.choice(forms)
    is_equal = random.random() < 0.5 and bool(drawn.equal)
    answer = random.choice(drawn.equal if is_equal else (*drawn.other, *drawn.arguable))
    label: Any = drawn.golds[0]
    if "dapo" in rule and label.lstrip("-").isdigit():
        label = random.choice((label, int(label), f" {label}", f"{label}.0"))
    sure = form not in UNCLOSED and "{} {}" not in form and ("<" not in form or "|" in form)
    right = (True if is_equal else False if answer in drawn.other else None) if form and sure else None
    return AnswerCase(
        rule, form.format(*[answer] * form.count("{}")), (str(label),), right=right, row=_row(rule, random, label, {})
    )


def _expression_case(rule: str, random: Random) -> AnswerCase:
    drawn = random.choice(EXPRESSIONS)
    kind = random.choice(("equal", "equal", "other", "arguable"))
    answers = getattr(drawn, kind) or drawn.equal
    form = random.choice(MARKS["box"])
    response = form.format(*[random.choice(answers)] * form.count("{}"))
    if rule.endswith("deepscaler"):
        response = random.choice(_THOUGHTS).format(response)
    sure = form not in UNCLOSED and answers is not drawn.arguable and rule == "slime_math"
    # `x = v` may be an equation of two unknowns
    sure = sure and "= \\mathbf" not in response
    right = answers is drawn.equal if sure else None
    return AnswerCase(rule, response, drawn.golds, right=right, row=_row(rule, random, drawn.golds[0], {}))


def _choice_case(rule: str, random: Random) -> AnswerCase:
    at, gold = random.randrange(len(OPTIONS)), random.randrange(len(OPTIONS))
    gold = at if random.random() < 0.5 else gold
    letters = "ABCDE"
    letter, text = letters[gold], OPTIONS[gold]
    by_letter = dict(zip(letters, OPTIONS, strict=True))
    label, metadata = random.choice(
        (
            (letter, {}),
            (letter.lower(), {}),
            (gold, {}),
            (letter, {"choices": [*OPTIONS]}),
            (text, {"choices": by_letter}),
            (gold, {"choices": [*OPTIONS], "correct_letter": "A"}),
            (text.upper(), {"choices": [*OPTIONS], "correct_letter": f" {letter.lower()}"}),
            (None, {"choices": by_letter, "correct_letter": letter}),
            (text, {"correct_letter": letter, "valid_letters": ["a", "b", "c", "d", "e"]}),
            (letter, {"valid_letters": [*letters], "answer_text": text}),
            (text, {}),
            (text, {"correct_answer": text.lower()}),
        )
    )
    names_letter = letter in (label, str(label).upper()) or isinstance(label, int) or "correct_letter" in metadata
    forms = _BOXED_CHOICES if "boxed" in rule and random.random() < 0.7 else _CHOICES
    form = random.choice((*forms, *forms, *_NO_ANSWER))
    other = (at + 1) % len(OPTIONS)
    response = form.format(letter=letters[at], lower=letters[at].lower(), text=OPTIONS[at], other=letters[other])
    sure = form in _PLAIN_CHOICES and (names_letter or "choices" in metadata)
    right = at == gold if sure else False if form in _NO_ANSWER else None
    return AnswerCase(rule, response, (letter,), right=right, row=_row(rule, random, label, metadata))
