"""An unbounded terminal screen: text and control sequences in, visible lines out.

Lines may have any length and everything that scrolled away is kept, so output without control sequences is returned
unchanged. Cursor movements stay within a window of `ROWS` and `COLUMNS`. Standard library only: this file is also sent
into sandboxes, for the agents of `workers/agents/presets/programs`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from unicodedata import category, east_asian_width

TAB = 8
_MARKS = 16
"""Maximum characters of a cell: one, and its accents."""

ROWS, COLUMNS = 50, 200
"""The size of the terminals of the shell's programs."""

_WORK, _WORK_PER_CHARACTER = 100_000, 4
"""Number of cells that a text may touch: a base, and more for each character. Normal programs touch one for each."""
_ROW = 8
"""Cost of inserting or dropping a line, in cells."""


# ECMA-48 and xterm's additions: text, control sequences, strings such as titles, other escapes, control characters.
# An unclosed string ends with its line, otherwise nothing after it would be visible.
_TOKEN = re.compile(
    r"([^\x00-\x1f\x7f-\x9f]+)"
    r"|(?:\x1b\[|\x9b)([0-?]*)[ -/]*([@-~]?)"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x18\x1a\x1b\x9c\n]*(?:\x07|\x9c|\x1b\\)?"
    r"|\x1b(?:[ -/]+[0-~]?|([0-~]))"
    r"|([\x00-\x1f\x7f-\x9f])"
)
# All except tab and line feed; searching for each is far faster than a pattern.
_ALL_CONTROLS = [*map(chr, (*range(9), *range(11, 32), *range(127, 160)))]
_ALTERNATE = {"47", "1047", "1049"}


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
                for column, cell in enumerate(self.cells):
                    tabs = cell == "\t" or (tabs and not cell)
                    self.cells[column] = " " if tabs else cell
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


def has_controls(text: str) -> bool:
    """Return whether a terminal would show a text differently."""
    return any(control in text for control in _ALL_CONTROLS)


def drawn(text: str, screen: Screen | None = None) -> tuple[str, bool]:
    """Return the text that a terminal shows, and whether some of the written text is not visible.

    The work is bounded: for a text that mainly moves and erases, only carriage returns determine the last frames.
    """
    if screen is None and not has_controls(text):
        return text, False
    screen = screen or Screen()
    try:
        screen.feed(text)
    except TooMuchWork:
        # It is inside a sequence that nothing continues.
        screen.give_up()
        return _last_frames(text), True
    return screen.take(), screen.lost


def _last_frames(text: str) -> str:
    """Return the text after the last carriage return of each line, without control sequences."""
    lines = "".join(map(_plain, _TOKEN.finditer(text))).split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def _plain(token: re.Match[str]) -> str:
    text, control = token[1], token[5]
    return text or (control if control and control in "\t\n\r" else "")


class TooMuchWork(Exception):
    """The sequences of a text move and erase far more than the text contains."""


class Screen:
    """Accepts text in any number of pieces. A sequence split between two of them is not recognised.

    `lost` is true once written text is no longer visible; `alternate` while a program draws on its own screen, as
    editors and pagers do.
    """

    def __init__(self) -> None:
        self.lost = False
        self._above: list[str] = []
        self._rows = [Row()]
        self._x = self._y = 0
        self._saved = 0, 0
        self._main: tuple[list[Row], int, int] | None = None
        self._last = ""
        self._work = _WORK

    @property
    def alternate(self) -> bool:
        return self._main is not None

    def feed(self, text: str) -> None:
        """Write a text. Raises TooMuchWork; the screen is unusable afterwards."""
        self._work += _WORK_PER_CHARACTER * len(text)
        for match in _TOKEN.finditer(text):
            written, parameters, final, escape, control = match.groups()
            if written is not None:
                self._write(written)
                self._last = written[-1]
            elif control is not None:
                if action := _CONTROLS.get(control):
                    action(self)
            elif final:
                self._sequence(parameters, final)
            elif escape is not None and (action := _ESCAPES.get(escape)):
                action(self)

    def take(self) -> str:
        """Return the visible text, with everything that scrolled away. A program's own screen stays as it is."""
        before = self._main[0] if self._main is not None else []
        rows = [*(before if any(row.cells for row in before) else ()), *self._rows]
        # Blanks before the cursor belong to a prompt.
        cursor_row = self._rows[self._y]
        lines = [*self._above, *(row.text(self._x if row is cursor_row else 0) for row in rows)]
        self._above = []
        if self._main is None:
            self._rows, self._x, self._y = [Row()], 0, 0
        else:
            self._main = [], 0, 0
        return "\n".join(lines)

    def give_up(self) -> None:
        """Drop everything that was written."""
        self.__init__()  # type: ignore[misc]

    def _spend(self, n_cells: int) -> None:
        self._work -= n_cells
        if self._work < 0:
            raise TooMuchWork

    def _write(self, text: str) -> None:
        cells = text if text.isascii() else cells_of(text)
        n, x, row = len(cells), self._x, self._rows[self._y]
        gap = x - len(row.cells)
        self._spend(n + max(0, gap))
        if gap > 0:
            row.cells += " " * gap
        if gap >= 0:
            row.cells += cells
        else:
            self._edit(row)
            blank_halves(row.cells, x, x + n)
            row.cells[x : x + n] = cells
        self._x = x + n

    def _edit(self, row: Row) -> list[str]:
        if not row.edited:
            self._spend(len(row.cells))
        self.lost = True
        return row.edit()

    def _tab(self) -> None:
        row, n = self._rows[self._y], TAB - self._x % TAB
        if self._x == len(row.cells) and not row.edited:
            self._spend(n)
            row.cells += ["\t", *[""] * (n - 1)]
        self._x += n

    def _return(self) -> None:
        self._x = 0

    def _back(self) -> None:
        self._x = max(0, self._x - 1)

    def _line_feed(self) -> None:
        # A program with its own screen configures its terminal so that this moves down.
        if self._main is None:
            self._x = 0
        self._index()

    def _next_line(self) -> None:
        self._x = 0
        self._index()

    def _index(self) -> None:
        if self._y == ROWS - 1:
            self._scroll()
        self._go(self._y + (self._y < ROWS - 1), self._x)

    def _scroll(self) -> None:
        self._spend(1)
        row = self._rows.pop(0)
        if self._main is None:
            self._above.append(row.text())
        self._rows.append(Row())

    def _reverse_index(self) -> None:
        if self._y:
            self._y -= 1
        else:
            self._scroll_down(1)

    def _go(self, y: int, x: int) -> None:
        """Move to a position in the window; to the right no further than its edge, unless the line is longer."""
        self._y = min(max(0, y), ROWS - 1)
        self._x = min(max(0, x), max(COLUMNS - 1, self._x))
        self._spend(1)
        while len(self._rows) <= self._y:
            self._rows.append(Row())

    def _save(self) -> None:
        self._saved = self._y, self._x

    def _restore(self) -> None:
        self._x = max(self._x, self._saved[1])
        self._go(*self._saved)

    def _reset(self) -> None:
        self._show_alternate(False)
        self._erase_screen(3)
        self._x = self._y = 0
        self._saved = 0, 0

    def _sequence(self, parameters: str, final: str) -> None:
        if parameters.startswith("?"):
            if final in "hl" and not _ALTERNATE.isdisjoint(parameters[1:].split(";")):
                self._show_alternate(final == "h")
        elif action := _SEQUENCES.get(final):
            # A number may have any length.
            numbers = [int(each[:6]) if each[:6].isdecimal() else 0 for each in parameters.split(";", 2)[:2]]
            action(self, *numbers[: 2 if final in "Hf" else 1])

    def _show_alternate(self, shows: bool) -> None:
        if shows and self._main is None:
            self._main = self._rows, self._y, self._x
            self._rows = [Row()]
            self._go(0, 0)
        elif not shows and self._main is not None:
            (rows, self._y, self._x), self._main = self._main, None
            self._rows = rows or [Row()]
            self.lost = True

    def _position(self, y: int = 1, x: int = 1) -> None:
        self._go(max(1, y) - 1, max(1, x) - 1)

    def _erase_screen(self, what: int = 0) -> None:
        if what == 0:
            self._erase_line(0)
            self._drop_rows(self._y + 1, len(self._rows))
        elif what == 1:
            self._erase_line(1)
            self._drop_rows(0, self._y)
            self._spend(_ROW * self._y)
            self._rows[:0] = [Row() for _ in range(self._y)]
        elif what in (2, 3):
            self._drop_rows(0, len(self._rows))
            self._rows = [Row() for _ in range(self._y + 1)]
            if what == 3 and self._above:
                self._above.clear()
                self.lost = True

    def _drop_rows(self, first: int, end: int) -> None:
        end = min(end, len(self._rows))
        self._spend(_ROW * max(1, end - first))
        self.lost = self.lost or any(row.cells for row in self._rows[first:end])
        del self._rows[first:end]

    def _erase_line(self, what: int = 0) -> None:
        row, x = self._rows[self._y], self._x
        n = len(row.cells)
        first, end = {0: (x, n), 1: (0, min(x + 1, n)), 2: (0, n)}.get(what, (0, 0))
        if first >= end:
            return
        cells = self._edit(row)
        if end == n:
            blank_halves(cells, first, end)
            del cells[first:]
        else:
            self._blank(cells, first, end)

    def _blank(self, cells: list[str], first: int, end: int) -> None:
        self._spend(end - first)
        blank_halves(cells, first, end)
        cells[first:end] = " " * (end - first)

    def _erase_characters(self, n: int = 1) -> None:
        row, x = self._rows[self._y], self._x
        if x < len(row.cells):
            self._blank(self._edit(row), x, min(x + max(1, n), len(row.cells)))

    def _delete_characters(self, n: int = 1) -> None:
        row, x = self._rows[self._y], self._x
        if x < len(row.cells):
            cells = self._edit(row)
            self._spend(len(cells) - x)
            blank_halves(cells, x, x + max(1, n))
            del cells[x : x + max(1, n)]

    def _insert_characters(self, n: int = 1) -> None:
        row, x = self._rows[self._y], self._x
        if x < len(row.cells):
            cells, n = self._edit(row), min(max(1, n), COLUMNS)
            width = max(COLUMNS, len(cells))
            self._spend(len(cells) - x + n)
            blank_halves(cells, x, x)
            cells[x:x] = " " * n
            del cells[width:]

    def _insert_rows(self, n: int = 1) -> None:
        n = min(max(1, n), ROWS - self._y)
        self._spend(_ROW * n)
        self._drop_rows(ROWS - n, ROWS)
        self._rows[self._y : self._y] = [Row() for _ in range(n)]
        self._x = 0

    def _delete_rows(self, n: int = 1) -> None:
        self._drop_rows(self._y, self._y + max(1, n))
        self._go(self._y, 0)

    def _scroll_up(self, n: int = 1) -> None:
        n = min(max(1, n), len(self._rows))
        self._spend(_ROW * n)
        for _ in range(n):
            self._scroll()

    def _scroll_down(self, n: int = 1) -> None:
        y, x = self._y, self._x
        self._y = 0
        self._insert_rows(n)
        self._go(y, x)

    def _repeat(self, n: int = 1) -> None:
        self._write(self._last * min(max(1, n), COLUMNS))


def _moves(rows: int, columns: int) -> Callable[..., None]:
    def move(screen: Screen, n: int = 1) -> None:
        n = max(1, n)
        screen._go(screen._y + rows * n, screen._x + columns * n)

    return move


def _moves_lines(rows: int) -> Callable[..., None]:
    def move(screen: Screen, n: int = 1) -> None:
        screen._go(screen._y + rows * max(1, n), 0)

    return move


_CONTROLS: dict[str, Callable[[Screen], None]] = {
    "\b": Screen._back,
    "\t": Screen._tab,
    "\n": Screen._line_feed,
    "\v": Screen._index,
    "\f": Screen._index,
    "\r": Screen._return,
    "\x84": Screen._index,
    "\x85": Screen._next_line,
    "\x8d": Screen._reverse_index,
}
_ESCAPES: dict[str, Callable[[Screen], None]] = {
    "7": Screen._save,
    "8": Screen._restore,
    "D": Screen._index,
    "E": Screen._next_line,
    "M": Screen._reverse_index,
    "c": Screen._reset,
}
_SEQUENCES: dict[str, Callable[..., None]] = {
    "@": Screen._insert_characters,
    "A": _moves(-1, 0),
    "B": _moves(1, 0),
    "C": _moves(0, 1),
    "D": _moves(0, -1),
    "E": _moves_lines(1),
    "F": _moves_lines(-1),
    "G": lambda screen, n=1: screen._go(screen._y, max(1, n) - 1),
    "H": Screen._position,
    "J": Screen._erase_screen,
    "K": Screen._erase_line,
    "L": Screen._insert_rows,
    "M": Screen._delete_rows,
    "P": Screen._delete_characters,
    "S": Screen._scroll_up,
    "T": Screen._scroll_down,
    "X": Screen._erase_characters,
    "`": lambda screen, n=1: screen._go(screen._y, max(1, n) - 1),
    "a": _moves(0, 1),
    "b": Screen._repeat,
    "d": lambda screen, n=1: screen._go(max(1, n) - 1, screen._x),
    "e": _moves(1, 0),
    "f": Screen._position,
    "s": lambda screen, *_: screen._save(),
    "u": lambda screen, *_: screen._restore(),
}
