"""Excerpts of files and folders for the model: lines numbered as by `cat -n`, up to a limit."""

from __future__ import annotations

import json
from collections.abc import Sequence

MAX_SHOWN_CHARS = 14_000
"""Slightly below the agent's default limit of an observation, beyond which it cuts out the middle."""
MAX_ROW_CHARS = 2_000


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
