r"""DAPO: the last line `Answer: ...` of the last 300 characters, equal to the gold answer after normalization; 1 or -1.

verl's `math_dapo.compute_score` takes a box where there is no line. skyrl_gym's `aime` does not, and its answer ends at
a `<`.
"""

from __future__ import annotations

import re

from workers.evaluators.answers.authors.answer_key import AnswerKey
from workers.evaluators.answers.authors.boxes import last_box
from workers.evaluators.authors_score import AuthorsScore

_LAST_CHARS, _LAST_CHARS_OF_BOX = 300, 100
_LONGEST_GOLD = 2000
"""Characters of a gold answer that no answer of 300 can equal, as normalization would have to remove the rest."""
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


def _score(rule: str, pattern: re.Pattern[str], response: str, key: AnswerKey) -> AuthorsScore:
    found = pattern.findall(response[-_LAST_CHARS:])
    answer = found[-1] if found else None
    right = len(key.gold) <= _LONGEST_GOLD and normalized(answer or _NONE) == normalized(key.gold)
    return AuthorsScore(rule, 1.0 if right else -1.0, right, answer)


def normalized(answer: str) -> str:
    """Return an answer without units, articles and typesetting, in the order in which theirs removes them."""
    answer = answer.split("=")[-1]
    for before, after in (*_REPLACED, *((text, "") for text in _REMOVED)):
        answer = answer.replace(before, after)
    for pattern, replacement in _TYPESETTING:
        answer = pattern.sub(replacement, answer)
    answer = answer.replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()
