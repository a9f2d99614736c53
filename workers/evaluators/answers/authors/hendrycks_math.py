r"""MATH: the last box, equal to the gold answer after the normalization of Hendrycks' data set.

Reproduces verl's `math_reward.compute_score`, which is that of EleutherAI's evaluation harness.
"""

from __future__ import annotations

from workers.evaluators.answers.authors.answer_key import MAX_CHARS, AnswerKey, box_of_last_mark
from workers.evaluators.authors_score import AuthorsScore

_BOX_OF_WORD = "\\boxed "
_REMOVED_FIRST = (
    *(("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", "")),
    *(("^{\\circ}", ""), ("^\\circ", ""), ("\\$", "")),
)
_UNIT = "\\text{ "


def boxed(response: str, key: AnswerKey) -> AuthorsScore:
    """Score the last box. Answers that the normalization cannot read are compared literally."""
    answer = _last_box(response[-MAX_CHARS:])
    right = answer is not None and equal(answer, key.gold)
    return AuthorsScore("hendrycks_math", float(right), right, answer)


def equal(answer: str, gold: str) -> bool:
    """Return whether two answers are equal after normalization; literally, if normalization fails on one."""
    try:
        return normalized(answer) == normalized(gold)
    except (IndexError, ValueError):
        return answer == gold


def _last_box(text: str) -> str | None:
    if _BOX_OF_WORD in text:
        return text.rpartition(_BOX_OF_WORD)[2].split("$")[0]
    # The authors' scorer also finds the last \fbox, but has no answer in it.
    return box_of_last_mark(text)


def normalized(text: str) -> str:
    """Return a normalized answer. Raises IndexError or ValueError where the authors' scorer fails."""
    for before, after in _REMOVED_FIRST:
        text = text.replace(before, after)
    if _UNIT in text:
        # Two units are more than it can read.
        text, _ = text.split(_UNIT)
    for before, after in (("\\\\%", ""), ("\\%", ""), (" .", " 0."), ("{.", "{0.")):
        text = text.replace(before, after)
    if not text:
        return text
    if text[0] == ".":
        text = "0" + text
    sides = text.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        text = sides[1]
    text = _with_fractions(_with_roots(text).replace(" ", ""))
    return _with_slash("\\frac{1}{2}" if text == "0.5" else text)


def _with_roots(text: str) -> str:
    first, *rest = text.split("\\sqrt")
    return first + "".join("\\sqrt" + (each if each[0] == "{" else f"{{{each[0]}}}{each[1:]}") for each in rest)


def _with_fractions(text: str) -> str:
    first, *rest = text.split("\\frac")
    result = [first]
    for each in rest:
        if each[0] == "{":
            result.append(f"\\frac{each}")
            continue
        if len(each) < 2:
            return text
        above, below = each[0], each[1] if each[1] == "{" else f"{{{each[1]}}}"
        result.append(f"\\frac{{{above}}}{below}{each[2:]}")
    return "".join(result)


def _with_slash(text: str) -> str:
    sides = text.split("/")
    if len(sides) != 2:
        return text
    try:
        above, below = int(sides[0]), int(sides[1])
    except ValueError:
        return text
    return f"\\frac{{{above}}}{{{below}}}" if text == f"{above}/{below}" else text
