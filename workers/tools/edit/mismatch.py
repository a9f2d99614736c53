"""Explains why a text to replace is not in the file: the likely mistake, for the model to correct."""

from __future__ import annotations

import re
from itertools import islice

from workers.tools.edit.excerpt import numbered, rows_of

_MAX_CHARS = 200_000
"""Maximum length of a file that is searched again: the worker serves other rollouts too."""

_NUMBERED = re.compile(r"^ *\d+\t")


def explained(text: str, old: str) -> str:
    """Return a sentence on the difference; empty if no likely one is found."""
    if max(len(text), len(old)) > _MAX_CHARS:
        return ""
    if _without_numbers(old) in text and _without_numbers(old) != old:
        return "`old_str` has the line numbers that `view` puts before each line: leave them and the tab out."
    if old.replace("\r\n", "\n") in text.replace("\r\n", "\n"):
        ends = r"some lines of the file end in \r\n" if "\r\n" in text else r"the lines of the file end only in \n"
        return f"Only line breaks differ: {ends}. Write them in `old_str` as they are."
    if result := _but_for_blanks(text, old):
        shown = numbered(rows_of(text), *result)
        return f"Only blanks or line breaks differ from lines {result[0]} to {result[1]}, which are:\n{shown}"
    return ""


def _without_numbers(old: str) -> str:
    """Return `old` without the number and tab before each line; unchanged if a line has none."""
    rows = old.split("\n")
    if not all(_NUMBERED.match(row) for row in rows if row.strip()):
        return old
    return "\n".join(_NUMBERED.sub("", row) for row in rows)


def _but_for_blanks(text: str, old: str) -> tuple[int, int] | None:
    """Return the first and last line of `old` in the text, with runs of blanks counted as one; None if absent."""
    wanted, squeezed = " ".join(old.split()), " ".join(text.split())
    at = squeezed.find(wanted) if wanted else -1
    if at < 0:
        return None
    first = squeezed.count(" ", 0, at)
    last = first + wanted.count(" ")
    words = list(islice(re.finditer(r"\S+", text), first, last + 1))
    return text.count("\n", 0, words[0].start()) + 1, text.count("\n", 0, words[-1].start()) + 1
