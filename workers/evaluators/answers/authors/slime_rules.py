r"""slime's rules by `rm_type`: `f1`, words in common; `gpqa`, an option's letter or text; `dapo`, a whole number.

The rule `boxed_...` of each passes the contents of the last box in place of the response.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from workers.evaluators.answers.authors.verl_rules import dapo_of_slime, normalized_words
from workers.evaluators.answers.final_answer import LETTERS
from workers.evaluators.answers.reference import AuthorsRule, Reference, box_of_last_mark
from workers.evaluators.authors_score import AuthorsScore

_EXACT = frozenset({"yes", "no", "noanswer"})
"""Answers that share no words with others."""
_LETTERS_OF_NO_OPTIONS = LETTERS[:10]
# A space is not read twice, which would take quadratic time.
_NAMED = (
    re.compile(r"(?:answer|option|choice)\s*+(?:(?:is|:)\s*+)?([A-Z])", re.IGNORECASE),
    re.compile(r"([A-Z])\s*+is\s*+(?:the\s*+)?correct", re.IGNORECASE),
    re.compile(r"final\s*+(?:answer|option)\s*+(?:(?:is|:)\s*+)?([A-Z])", re.IGNORECASE),
)
_STANDALONE = re.compile(r"\b([A-Z])\b")
_NO_LETTERS_OR_DIGITS = re.compile(r"[^a-z0-9]+")
_THINKING_ENDS = "</think>"


def overlap(response: str, key: Reference) -> AuthorsScore:
    """Score the words that a whole response and a gold answer have in common, by F1."""
    value = max(_f1(normalized_words(response), normalized_words(gold)) for gold in key.golds)
    return AuthorsScore("slime_f1", value, value == 1.0, response if value == 1.0 else None)


def _f1(answer: str, gold: str) -> float:
    if answer != gold and not _EXACT.isdisjoint((answer, gold)):
        return 0.0
    answer_words, gold_words = answer.split(), gold.split()
    n_common = (Counter(answer_words) & Counter(gold_words)).total()
    if n_common == 0:
        return 0.0
    precision, recall = n_common / len(answer_words), n_common / len(gold_words)
    return 2 * precision * recall / (precision + recall)


def choice(response: str, key: Reference) -> AuthorsScore:
    """Score the letter that a response names; without a letter, the gold option's text anywhere in the response."""
    text = response.rpartition(_THINKING_ENDS)[2]
    letters = LETTERS[: len(key.options)] or _LETTERS_OF_NO_OPTIONS
    letter = _named_letter(text, letters)
    if letter and key.options:
        return AuthorsScore("slime_gpqa", float(letter == key.gold), letter == key.gold, letter)
    # If a row lists no options they are the letters, which are not texts.
    texts = [option for each, option in zip(letters, key.options, strict=False) if each == key.gold != option]
    named = words_of_choice(text)
    targets = map(words_of_choice, (*texts, *(key.golds[1:] if key.options else key.golds)))
    right = any(target in named for target in targets if target)
    return AuthorsScore("slime_gpqa", float(right), right, letter)


def _named_letter(text: str, letters: str) -> str | None:
    first = (match.group(1).upper() for pattern in _NAMED if (match := pattern.search(text)))
    standalone: Iterable[str] = reversed(_STANDALONE.findall(text))
    return next((letter for named in (first, standalone) for letter in named if letter in tuple(letters)), None)


def words_of_choice(text: str) -> str:
    """Return the letters and digits of a text, as words, in slime's form for comparison."""
    return _NO_LETTERS_OR_DIGITS.sub(" ", text.lower()).strip()


def _boxed(name: str, rule: AuthorsRule) -> AuthorsRule:
    def boxed(response: str, key: Reference) -> AuthorsScore:
        return replace(rule(box_of_last_mark(response) or "", key), rule=name)

    return boxed


_OF_TYPES: dict[str, Callable[[str, Reference], AuthorsScore]] = {
    "f1": overlap,
    "gpqa": choice,
    "dapo": dapo_of_slime,
}
RULES_OF_SLIME: dict[str, AuthorsRule] = {
    **{f"slime_{name}": rule for name, rule in _OF_TYPES.items()},
    **{f"slime_boxed_{name}": _boxed(f"slime_boxed_{name}", rule) for name, rule in _OF_TYPES.items()},
}
"""By `slime_` and the `rm_type`."""
