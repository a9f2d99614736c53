r"""DAPO: the last line `Answer: ...` of the last 300 characters, equal to the gold answer after normalization; 1 or -1.

verl's `math_dapo.compute_score` uses a box if there is no such line. skyrl_gym's `aime` does not, and its answer ends
at a `<`. slime's `math_dapo_utils` does not either; it removes end-of-model marks, and its gold answers are whole
numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from workers.evaluators.answers.authors.answer_key import AnswerKey, last_box
from workers.evaluators.authors_score import AuthorsScore

_LAST_CHARS, _LAST_CHARS_OF_BOX = 300, 100
_LONGEST_GOLD = 2000
"""Maximum characters of a gold answer that an answer of 300 can equal after normalization."""
_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_LINE_OF_SKYRL = re.compile(r"(?i)Answer\s*:\s*([^\n<]+)")
_NONE = "[INVALID]"
_REPLACED = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)
_REMOVED_BY_SLIME = ("<|im_end|>", "<|endoftext|>")
_TYPESETTING = (
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),
    *((re.compile(rf"(\\{name}\{{)(.*?)(\}})"), r"\2") for name in ("text", "textbf", "overline")),
    (re.compile(r"(\\boxed\{)(.*)(\})"), r"\2"),
    (re.compile(r"(frac)([^{])(.)"), r"frac{\2}{\3}"),
    (re.compile(r"(sqrt)([^{])"), r"sqrt{\2}"),
)


def line(response: str, key: AnswerKey) -> AuthorsScore:
    score = _score("dapo", _LINE, response, key)
    boxed = last_box(response[-_LAST_CHARS:][-_LAST_CHARS_OF_BOX:]) if score.answer is None else None
    if boxed is None:
        return score
    right = boxed == key.gold
    return AuthorsScore("dapo", 1.0 if right else -1.0, right, boxed)


def line_of_skyrl(response: str, key: AnswerKey) -> AuthorsScore:
    return _score("skyrl_aime", _LINE_OF_SKYRL, response, key)


def line_of_slime(response: str, key: AnswerKey) -> AuthorsScore:
    """Score the last line `Answer: ...`. A non-numeric gold answer, on which slime's scorer fails, equals nothing."""
    found = _LINE.findall(response[-_LAST_CHARS:])
    answer = found[-1] if found else None
    gold = whole_number_of_slime(key.gold)
    right = gold is not None and normalized(answer or _NONE, _REMOVED_BY_SLIME) == gold
    for mark in _REMOVED_BY_SLIME:
        answer = answer and answer.replace(mark, "")
    return AuthorsScore("slime_dapo", 1.0 if right else -1.0, right, answer)


def whole_number_of_slime(gold: str) -> str | None:
    """Return the whole number that slime reads in a gold answer, without its fraction; None if not a number."""
    try:
        return str(int(float(normalized(gold[:_LONGEST_GOLD], _REMOVED_BY_SLIME))))
    except (ValueError, OverflowError):
        return None


def _score(rule: str, pattern: re.Pattern[str], response: str, key: AnswerKey) -> AuthorsScore:
    found = pattern.findall(response[-_LAST_CHARS:])
    answer = found[-1] if found else None
    right = len(key.gold) <= _LONGEST_GOLD and normalized(answer or _NONE) == normalized(key.gold)
    return AuthorsScore(rule, 1.0 if right else -1.0, right, answer)


def normalized(answer: str, also_removed: Sequence[str] = ()) -> str:
    """Return an answer without units, articles and typesetting, removed in the order of the authors' scorer."""
    answer = answer.split("=")[-1]
    for before, after in (*_REPLACED, *((text, "") for text in (*_REMOVED, *also_removed))):
        answer = answer.replace(before, after)
    for pattern, replacement in _TYPESETTING:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()
