"""A row's correct answers, in the form that its authors' scorer gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workers.evaluators.authors_score import AuthorsScore

MAX_CHARS = 100_000
"""Characters at the end of a response that a scorer reads; the authors' scorers read all, or fewer."""

PATTERN_CHARS = 20_000
"""Characters at the end of a response in which a row's own pattern is searched."""


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
