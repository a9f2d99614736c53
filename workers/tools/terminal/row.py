"""A line of a terminal: one cell per column. Standard library only, like `screen.py`, which is sent along."""

from __future__ import annotations

from functools import lru_cache
from unicodedata import category, east_asian_width

TAB = 8
_MARKS = 16
"""Maximum characters of a cell: one, and its accents."""


class Row:
    """A line: a list of cells; the second cell of a wide character is empty, and so are those that a tab skips."""

    __slots__ = ("cells", "edited")

    def __init__(self) -> None:
        self.cells: list[str] = []
        self.edited = False

    def text(self, n: int = 0) -> str:
        """Return the visible text: trailing blanks of an overwritten line are dropped, after `n` cells."""
        if not self.edited:
            return "".join(self.cells)
        return "".join(self.cells[:n]) + "".join(self.cells[n:]).rstrip(" ")

    def edit(self) -> list[str]:
        """Return the cells, each of which may be changed: tabs become blanks."""
        if not self.edited:
            self.edited = True
            if "\t" in self.cells:
                tabs = False
                for place, cell in enumerate(self.cells):
                    tabs = cell == "\t" or (tabs and not cell)
                    self.cells[place] = " " if tabs else cell
        return self.cells


def cells_of(text: str) -> str | list[str]:
    """Return the cells of a text, one for each column."""
    if all(_width(character) == 1 for character in set(text)):
        return text
    cells: list[str] = []
    base = -1
    for character in text:
        width = _width(character)
        if width == 0 and base >= 0:
            # A mark is part of the character before it.
            if len(cells[base]) < _MARKS:
                cells[base] += character
            continue
        base = len(cells)
        cells.append(character)
        if width == 2:
            cells.append("")
    return cells


@lru_cache(4096)
def _width(character: str) -> int:
    if category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if east_asian_width(character) in "WF" else 1


def blank_halves(cells: list[str], first: int, end: int) -> None:
    """Replace the remaining half of a wide character by a blank if its other half is between these cells."""
    if 0 < first < len(cells) and not cells[first]:
        cells[first - 1] = cells[first] = " "
    if end < len(cells) and not cells[end]:
        cells[end] = " "
