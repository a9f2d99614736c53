"""Texts that programs write to terminals, and random texts: always the same."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

_WORDS = ("error", "12%", "a", "...", "done: ok", "x" * 12, " ", "  ", "█████", "é", "e\u0301", "0/9")
_WIDE = ("狐狸", "🙂", "a", "b\u0301", "한국어")
_MOVES = "ABCDEFGade"
_EDITS = "@JKLPX"
_ESCAPES = ("\x1bD", "\x1bM", "\x1b7", "\x1b[31m", "\x1b[0;1;38;5;9m", "\x1b[m", "\x1b]0;title\x07", "\x1b(B")
_OTHERS = (
    "\x1bE",
    "\x1b[{}`",
    "\x1b[{}b",
    "\x1b[{}S",
    "\x1b[{}T",
    "\x1b[s",
    "\x1b[u",
    "\x1b[?1049h",
    "\x1b[?1049l",
    "\x1b[?47h",
)
N = 60
"""Number of generated texts of each kind."""


def _words(draw: random.Random, n: int = 8) -> str:
    return "".join(draw.choice(_WORDS) for _ in range(draw.randrange(n)))


def _number(draw: random.Random) -> str:
    return draw.choice(("", "0", "1", "2", "3", "5", "9", "17"))


def _far(draw: random.Random) -> str:
    return draw.choice(("40", "49", "50", "199", "200", "201", "1000000000"))


def _lines(draw: random.Random) -> str:
    ends = ("\n", "\n", "\r\n", "\r", "\r", "\b", "\b\b", "\b \b", "\v", "\f", "\a", "\0", "\n\n", "\x7f", "\x0e")
    return "".join(_words(draw, 4) + draw.choice(ends) for _ in range(draw.randrange(1, 30)))


def _tabs(draw: random.Random) -> str:
    parts = ("\t", "\t", "ab", "c", "\n", "\r", "\b", " ")
    return "".join(draw.choice(parts) for _ in range(draw.randrange(1, 40)))


def _bars(draw: random.Random) -> str:
    n_bars, frames = draw.randrange(1, 4), []
    for step in range(draw.randrange(2, 12)):
        for bar in range(n_bars):
            down, up = "\n" * bar, "\x1b[A" * bar
            frame = f"\r{'step' if step % 2 else 'it'} {step}: {'#' * step}{'.' * draw.randrange(5)}"
            frames.append(f"{down}{frame}{draw.choice(('', chr(27) + '[K', '  '))}{up}")
    return _words(draw) + "\n" + "".join(frames) + "\n" * n_bars + "end\n"


def _scrolled(draw: random.Random) -> str:
    lines = "".join(f"{number} {_words(draw, 3)}\n" for number in range(draw.randrange(40, 130)))
    return lines + _moving(draw)


def _moving(draw: random.Random) -> str:
    return "".join(_words(draw, 3) + _one(draw, _MOVES) for _ in range(draw.randrange(1, 25)))


def _editing(draw: random.Random) -> str:
    return "".join(_words(draw, 3) + _one(draw, _MOVES + _EDITS * 2) for _ in range(draw.randrange(1, 25)))


def _one(draw: random.Random, finals: str) -> str:
    if draw.random() < 0.3:
        return draw.choice(("\n", "\r", "\b", *_ESCAPES))
    if draw.random() < 0.2:
        return f"\x1b[{draw.choice((_number, _far))(draw)};{_number(draw)}{draw.choice('Hf')}"
    final = draw.choice(finals)
    far = final in "ABEFdeXLP" and draw.random() < 0.3
    number = draw.choice(("", "0", "1", "2")) if final in "JK" else (_far if far else _number)(draw)
    return f"{draw.choice((chr(27) + '[', chr(155)))}{number}{final}"


def _restored(draw: random.Random) -> str:
    return f"{_moving(draw)}\x1b7{_editing(draw)}\x1b8{_editing(draw)}{draw.choice(('', chr(27) + 'c'))}{_words(draw)}"


def _deletions(draw: random.Random) -> str:
    lines = "".join(f"{number}\n" for number in range(draw.randrange(1, 50)))
    return lines + "".join(f"\x1b[{_number(draw)};{_number(draw)}H\x1b[{_number(draw)}M" for _ in range(3))


def _edges(draw: random.Random) -> str:
    """Write at most one character, and go back, since text after it is on another line there."""
    moves = ("\x1b[{}C", "\x1b[{}G", "\x1b[{}a", "\x1b[9;{}H", "\x1b[{}B", "\x1b[{};3H", "\x1b[{}@")
    parts = (draw.choice(moves).format(_far(draw)) + draw.choice(("x", "", "é")) + "\r" for _ in range(9))
    return _words(draw) + "".join(f"{part}{_words(draw, 3)}{draw.choice(chr(10) + chr(13))}" for part in parts)


def _wide(draw: random.Random) -> str:
    return "".join(draw.choice((*_WIDE, "\n", "\r\n", "\n\n")) for _ in range(draw.randrange(1, 60)))


def _halves(draw: random.Random) -> str:
    return f"{_wide(draw)}狐狸狐\r{draw.choice(('a', 'abc', chr(27) + '[C'))}{draw.choice(_WIDE)}\n{_wide(draw)}"


def _long_lines(draw: random.Random) -> str:
    return f"{'long ' * draw.randrange(50, 99)}\r{_words(draw)}\n{_words(draw)}"


def _more_parameters(draw: random.Random) -> str:
    return f"{_words(draw)}\x1b[1;{_number(draw)}{draw.choice('ABCD')}{_words(draw)}"


def _other_sequences(draw: random.Random) -> str:
    parts = (_words(draw, 5) + draw.choice(_OTHERS).format(draw.choice("1239")) for _ in range(draw.randrange(2, 9)))
    return "".join(f"{part}\n" for part in parts)


def _regions(draw: random.Random) -> str:
    return f"{_words(draw)}\n\x1b[2;{draw.randrange(3, 9)}r{''.join(_words(draw, 3) + chr(10) for _ in range(12))}"


def _strings(draw: random.Random) -> str:
    begin = draw.choice(("\x1b]0;", "\x1b]8;;", "\x1b]"))
    return f"{_words(draw)}{begin}{draw.randrange(99)}\n{_words(draw)}\n"


_KINDS: dict[str, Callable[[random.Random], str]] = {
    "lines": _lines,
    "tabs": _tabs,
    "bars": _bars,
    "scrolled": _scrolled,
    "moves": _moving,
    "edits": _editing,
    "saved": _restored,
    "deletions": _deletions,
    "edges": _edges,
    "wide": _wide,
    "halves": _halves,
    "long lines": _long_lines,
    "more parameters": _more_parameters,
    "other sequences": _other_sequences,
    "regions": _regions,
    "strings": _strings,
}


def _drawn() -> Iterator[tuple[str, str]]:
    for kind, write in _KINDS.items():
        draw = random.Random(kind)
        for number in range(N):
            yield f"{kind} {number}", write(draw)


def screen_cases() -> dict[str, str]:
    """Return the texts by name."""
    return dict(itertools.chain((("plain", "one\ntwo\n"),), _drawn()))
