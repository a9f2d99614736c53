"""Multiple choice by rules: the option that an answer names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase

from workers.evaluators.answers.normal_text import words

_LETTER = re.compile(
    r"(?:(?:option|choice|answer)\s*)?[(\[]?([a-z])[)\]]?(?:\s*[.:)]\s*(.*)|\s*)", re.IGNORECASE | re.DOTALL
)
_SAYS = re.compile(r"\b(?:answer|option|choice)(?: to (?:the|this) question)?(?: is:?|:) *", re.IGNORECASE)
LETTERS = ascii_uppercase
MAX_OPTIONS = len(LETTERS)
NONE_NAMED = "it names no option"


def chosen(answer: str, options: Sequence[str]) -> tuple[str, str]:
    """Return the letter of the option that an answer names, or the reason why it names none.

    Accepted: a letter, an option's text, or a letter with the text of the same option; an option that is itself a
    letter is named by that text. A sentence `The answer is ...` counts by its end.
    """
    text = sentence_end(words(answer)) or words(answer)
    for folded in (str, str.casefold):
        by_text = [LETTERS[at] for at, option in enumerate(options) if folded(words(option)) == folded(text)]
        if len(by_text) == 1:
            return by_text[0], ""
    match = _LETTER.fullmatch(text)
    if match is None:
        return "", NONE_NAMED
    letter, rest = match.group(1).upper(), match.group(2)
    at = LETTERS.index(letter)
    if at >= len(options):
        return "", f"there is no option {letter}"
    # An option that equals its letter has its text in the question.
    if rest and options[at] != letter and words(rest).casefold() != words(options[at]).casefold():
        return "", f"it names option {letter}, and gives another text for it"
    return letter, ""


def sentence_end(line: str) -> str:
    """Return the end of a line's only sentence `the answer is ...`; empty if it has none, or several."""
    parts = _SAYS.split(line)
    return words(parts[1]) if len(parts) == 2 else ""
