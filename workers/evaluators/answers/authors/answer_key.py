"""The correct answers of a row in the form of the authors' scorers, and the last box of a text by their rules."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from workers.evaluators.authors_score import AuthorsScore

MAX_CHARS = 100_000
"""Characters at the end of a response that a scorer reads; the authors' scorers read all, or fewer."""

PATTERN_CHARS = 20_000
"""Characters at the end of a response in which a row's own pattern is searched."""
BOX = "\\boxed{"
_BRACE = re.compile(r"[{}]")


@dataclass(frozen=True, slots=True)
class AnswerKey:
    """The gold answers, all equally good; with `options`, the first gold answer is the letter of one of them."""

    golds: tuple[str, ...]
    options: tuple[str, ...] = ()
    pattern: str = ""
    """A regular expression of the row that extracts the answer before the scorer looks for it."""
    other_patterns: tuple[str, ...] = ()
    """Patterns to try in order if the first finds no answer."""
    prefix: str = ""
    """A text of the row that introduces an answer, as `Answer:` does."""

    @property
    def gold(self) -> str:
        return self.golds[0]


AuthorsRule = Callable[[str, AnswerKey], AuthorsScore]
"""A scorer of a response; it never raises, and takes time linear in the response."""


def last_box(text: str) -> str | None:
    """Return the contents of the last box; None if there is none, or it is unclosed. Escaped braces count."""
    start = text.rfind(BOX)
    return None if start < 0 else box_at(text, start)


def box_of_last_mark(text: str) -> str | None:
    r"""Return the contents of the box at the last `\boxed`; None if it has no brace there, or is unclosed."""
    start = text.rfind("\\boxed")
    return box_at(text, start) if start >= 0 and text.startswith(BOX, start) else None


def box_at(text: str, start: int) -> str | None:
    """Return the contents of the box that begins at a position; None if it is unclosed."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[start + len(BOX) : brace.start()]
    return None
