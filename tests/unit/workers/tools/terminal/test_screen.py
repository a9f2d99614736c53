"""Texts as a terminal shows them. In `tests/oracles`, pyte renders 961 more."""

from __future__ import annotations

import random
import time

import pytest

from workers.tools.terminal.screen import COLUMNS, ROWS, Screen, drawn


@pytest.mark.parametrize(
    ("written", "shown", "lost"),
    [
        ("", "", False),
        ("one\ntwo", "one\ntwo", False),
        ("one\r\ntwo\r\n", "one\ntwo\n", False),
        ("\x1b[1;31mred\x1b[0m \x1b]0;title\x07and\x1b(B \x1b]8;;url\x1b\\link", "red and link", False),
        ("  1%\r 50%\r100%\n", "100%\n", True),
        ("downloading\rdone\x1b[K\n", "done\n", True),
        ("downloading\rdone       \n", "done\n", True),
        ("50%\rname? ", "name? ", True),
        ("abc\b\b\bX", "Xbc", True),
        ("abc\b \b", "ab", True),
        ("kept blanks  \nlast\r\n", "kept blanks  \nlast\n", False),
        ("all:\n\tcc -o a a.c\r\n", "all:\n\tcc -o a a.c\n", False),
        ("a\tb\rX", "X       b", True),
        ("top\nmiddle\nlow\x1b[2A\rTOP", "TOP\nmiddle\nlow", True),
        ("old\x1b[2J\x1b[Hnew", "new", True),
        ("one\n\x1b[3;5Hfive", "one\n\n    five", False),
        ("\u72d0\u72f8\rab", "ab\u72f8", True),
        ("\u72d0\u72f8\ra", "a \u72f8", True),
        ("cafe\u0301\rCafe\u0301", "Cafe\u0301", True),
        ("bell\a nul\0 del\x7f", "bell nul del", False),
        ("\x1b", "", False),
        ("\x1b[", "", False),
        ("cut \x1b]0;title\nnext", "cut \nnext", False),
        ("edit\n\x1b[?1049hfile\x1b[?1049lback", "edit\nback", True),
        ("\x1b[?1049h\rline 1\r\n(END)", "line 1\n(END)", False),
        ("-\x1b[9b", "----------", False),
    ],
)
def test_text_is_rendered(written: str, shown: str, lost: bool) -> None:
    assert drawn(written) == (shown, lost)


def test_text_without_control_characters_is_returned_unchanged() -> None:
    text = "a\tb  \n\u72d0 \n" * 1000
    assert drawn(text)[0] is text


def test_all_lines_of_any_number_and_length_are_kept() -> None:
    text = "".join(f"{number} {'x' * number}\n" for number in range(2000))
    assert drawn(f"{text}1\r2\n") == (f"{text}2\n", True)


def test_cursor_movements_stay_within_the_window() -> None:
    shown, _ = drawn("\x1b[1000000000;1000000000HX\x1b[1000000000A\x1b[1000000000DO")
    lines = shown.split("\n")
    assert len(lines) == ROWS
    assert (lines[0], lines[-1]) == ("O", f"{' ' * (COLUMNS - 1)}X")


def test_lines_that_scrolled_away_cannot_be_changed() -> None:
    text = "".join(f"{number}\n" for number in range(100))
    shown, _ = drawn(f"{text}\x1b[999A\rX")
    assert shown.split("\n")[100 - ROWS : 103 - ROWS] == ["50", "X1", "52"]


@pytest.mark.parametrize(
    "written",
    [
        "\x1b[999999999@x" * 90_000,
        "a" * 500_000 + "\x1b[1G\x1b[1P" * 60_000,
        "a" * 500_000 + "\r\x1b[1K\x1b[2K" * 60_000,
        "\x1b[200Gx\n" * 120_000,
        "\x1b[50;1H" + "\x1b[2J" * 250_000,
        "\x1b[50;1H" + "\x1b[99S" * 250_000,
        "\x1b[99L" * 250_000,
        "\x1b[" + "9" * 1_000_000 + "H",
        "\x1b]" * 500_000,
        "a" + "\u0301" * 900_000 + "\r",
        "\x1b[?1049h" + "\x1b[999b" * 150_000,
    ],
)
def test_hostile_texts_take_linear_time(written: str) -> None:
    began = time.process_time()
    shown, _ = drawn(written)
    # a tenth of it on an idle machine; with quadratic time it takes minutes
    assert time.process_time() - began < 15.0
    assert len(shown) <= 4 * len(written) + 200_000


def test_any_bytes_are_shown() -> None:
    draw = random.Random(1)
    pieces = ["\x1b", "[", "?", ";", "1", "50", "999999999999", "\x9b", "\r", "\n", "\b", "\t", "a", "\u72d0", "\u0301"]
    pieces += list("@ABCDEFGHJKLMPSTX`abdefhlsu78c")
    for _ in range(300):
        text = "".join(draw.choice(pieces) for _ in range(200))
        shown, _ = drawn(text)
        assert not any(character < " " and character not in "\n\t" for character in shown)


def test_alternate_screen_of_a_program_is_shown_completely_each_time() -> None:
    screen = Screen()
    assert drawn("$ edit\n\x1b[?1049h\x1b[2J\x1b[1;1Hline one\x1b[2;1Hline two", screen)[0] == (
        "$ edit\n\nline one\nline two"
    )
    assert screen.alternate
    assert drawn("\x1b[2;6HTWO", screen)[0] == "line one\nline TWO"
    assert drawn("\x1b[?1049lsaved\n", screen)[0] == "saved\n"
    assert not screen.alternate
