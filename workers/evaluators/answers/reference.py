"""A row's correct answers, for the farm's scorer and its authors', and the last box of a text by the authors' rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from workers.evaluators.authors_score import AuthorsScore

MAX_CHARS = 100_000
"""Characters at the end of a response that a scorer reads; the authors' scorers read all, or fewer."""

PATTERN_CHARS = 20_000
"""Characters at the end of a response in which a row's own pattern is searched."""
BOX = "\\boxed{"
_BRACE = re.compile(r"[{}]")


@dataclass(frozen=True, slots=True)
class Reference:
    """The request and its gold answer; with `options`, the letter of one. `pattern` extracts the final answer.

    `evaluated`: an answer is wrong if it contains operations that the gold answer does not; None applies that only if
    the gold answer is a number. `rule` names the authors' scorer, one of `authors/rules.py`: the answer that it
    extracts is compared, and its own score is returned, too.
    """

    request: str
    gold: str
    options: Sequence[str] = ()
    pattern: str = ""
    evaluated: bool | None = None
    other_golds: Sequence[str] = ()
    """Further answers that are equally good."""
    rule: str = ""
    other_patterns: Sequence[str] = ()
    """Patterns to try in order if the first finds no answer."""
    prefix: str = ""
    """A text that introduces an answer, for rules that support one."""

    @property
    def golds(self) -> tuple[str, ...]:
        return (self.gold, *self.other_golds)


AuthorsRule = Callable[[str, Reference], AuthorsScore]
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
    end = closing_brace(text, start)
    return None if end is None else text[start + len(BOX) : end]


def closing_brace(text: str, start: int) -> int | None:
    """Return the position of the brace after which as many are closed as opened; None if there is none."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0 and brace.group() == "}":
            return brace.start()
    return None
