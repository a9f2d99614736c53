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
    """Return the cases of a rule, drawn by its name."""
    random = Random(rule)
    draw = _choice_case if rule.endswith("gpqa") else _case
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
