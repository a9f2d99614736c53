"""The right answers of a row, as its authors' scorer is given them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workers.evaluators.authors_score import AuthorsScore

MAX_CHARS = 100_000
"""Characters at the end of a response that a scorer looks at; theirs look at all, or at fewer."""

PATTERN_CHARS = 20_000
"""Characters at the end of a response in which a row's own pattern is searched for."""


@dataclass(frozen=True, slots=True)
class AnswerKey:
    """The gold answers, each as good as the first; with `options`, the first is the letter of one of these texts."""

    golds: tuple[str, ...]
    options: tuple[str, ...] = ()
    pattern: str = ""
    """A regular expression of the row that finds the answer before its scorer looks for it."""
    other_patterns: tuple[str, ...] = ()
    """Patterns that are tried in their order where the first finds no answer."""
    prefix: str = ""
    """A text of the row that begins an answer, as `Answer:` does."""

    @property
    def gold(self) -> str:
        return self.golds[0]


AuthorsRule = Callable[[str, AnswerKey], AuthorsScore]
"""A scorer of a response; it raises nothing, and takes time in proportion to the response."""
