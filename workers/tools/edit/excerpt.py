"""Excerpts of files and folders for the model, numbered as by `cat -n`; and why a text to replace is not in a file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import islice

MAX_SHOWN_CHARS = 14_000
"""Slightly below the agent's default limit of an observation, beyond which it cuts out the middle."""
MAX_ROW_CHARS = 2_000

_MAX_CHARS = 200_000
"""Maximum length of a file that is searched again: the worker serves other rollouts too."""

_NUMBERED = re.compile(r"^ *\d+\t")


def rows_of(text: str) -> list[str]:
    """Return the lines of a text as editors count them: text after the last line break is one unless empty."""
    rows = text.split("\n")
    if not rows[-1]:
        rows.pop()
    return rows


def numbered(rows: Sequence[str], first: int, last: int) -> str:
    """Return lines `first` to `last`, counted from 1; if they are too many, a note says which are omitted."""
    last = min(last, len(rows))
    shown: list[str] = []
    n_chars = 0
    for number in range(first, last + 1):
        row = f"{number:6}\t{_cut(rows[number - 1])}"
        n_chars += len(row) + 1
        if n_chars > MAX_SHOWN_CHARS:
            return "\n".join([*shown, f"[Lines {number} to {last} are left out; see them with `view_range`.]"])
        shown.append(row)
    return "\n".join(shown)


def listed(names: Sequence[str]) -> tuple[str, int]:
    """Return names, one per line, and the number of omitted ones if they are too many."""
    shown: list[str] = []
    n_chars = 0
    for name in names:
        row = name if name.isprintable() else json.dumps(name)  # It may contain line breaks.
        n_chars += len(row) + 1
        if n_chars > MAX_SHOWN_CHARS:
            break
        shown.append(row)
    return "\n".join(shown), len(names) - len(shown)


def quoted(text: str) -> str:
    """Return a text as part of a message, truncated if long."""
    return text if len(text) <= MAX_ROW_CHARS else text[:MAX_ROW_CHARS] + "..."


def _cut(row: str) -> str:
    if len(row) <= MAX_ROW_CHARS:
        return row
    return f"{row[:MAX_ROW_CHARS]}[... {len(row) - MAX_ROW_CHARS} more characters in this line]"


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
