"""GSM8K: a number after `####`, or with `flexible` the last number, equal to the gold answer as text.

verl's `gsm8k.compute_score` uses the last such number of the last 300 characters, skyrl_gym's the first of all.
"""

from __future__ import annotations

import re

from workers.evaluators.answers.authors.answer_key import MAX_CHARS, AnswerKey
from workers.evaluators.authors_score import AuthorsScore

_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")
_LINE = re.compile(r"^[ \t]*####[ \t]*(\S.*)$", re.M)
_LAST_CHARS = 300


def strict(response: str, key: AnswerKey) -> AuthorsScore:
    found = _MARKED.findall(response[-_LAST_CHARS:])
    return _score("gsm8k", found[-1] if found else None, key)


def strict_of_skyrl(response: str, key: AnswerKey) -> AuthorsScore:
    found = _MARKED.search(response[-MAX_CHARS:])
    return _score("skyrl_gsm8k", None if found is None else found.group(1), key)


def flexible(response: str, key: AnswerKey) -> AuthorsScore:
    found = _NUMBER.findall(response[-_LAST_CHARS:])
    # If all matches are only signs the first one counts, as nothing stops the authors' search.
    answer = next((each for each in reversed(found) if each != "."), found[0] if found else None)
    return AuthorsScore("gsm8k_flexible", float(answer == key.gold), answer == key.gold, answer)


def last_marked_line(response: str) -> str | None:
    """Return the text, such as `$72`, of the last line that begins with `####`."""
    found = _LINE.findall(response[-MAX_CHARS:])
    return found[-1].strip() if found else None


def _score(rule: str, answer: str | None, key: AnswerKey) -> AuthorsScore:
    right = answer is not None and answer.replace(",", "") == key.gold
    return AuthorsScore(rule, float(right), right, answer)
