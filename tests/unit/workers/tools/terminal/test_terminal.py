"""The shown part of an output, and the stored part."""

from __future__ import annotations

import asyncio

from workers.tools.terminal import SHOWN, TerminalOutput

BAR = "".join(f"\r{number}%" for number in range(101)) + "\n"


def test_plain_output_has_no_artefact() -> None:
    shown = asyncio.run(TerminalOutput().shown("one\n", None, "bash.txt"))
    assert shown == ("one\n", (), True)


def test_colours_are_removed_and_nothing_is_stored() -> None:
    shown = asyncio.run(TerminalOutput().shown("\x1b[32mok\x1b[0m\n", None, "bash.txt"))
    assert shown == ("ok\n", (), False)


def test_output_that_is_not_shown_is_stored_as_written() -> None:
    text, (kept,), as_written = asyncio.run(TerminalOutput().shown(BAR, None, "bash.txt"))
    assert (text, as_written) == ("100%\n", False)
    assert (kept.name, kept.media_type, kept.data.decode()) == ("bash.txt", "text/plain", BAR)


def test_long_output_is_rendered_before_it_is_cut() -> None:
    full = (BAR * 1000 + "end\n").encode()
    text, (kept,), _ = asyncio.run(TerminalOutput().shown(BAR, full, "bash.txt"))
    assert text == "100%\n" * 1000 + "end\n"
    assert kept.data == full


def test_shown_text_is_limited() -> None:
    full = ("\r" + "x" * 99 + "\n") * 100_000
    text, _, _ = asyncio.run(TerminalOutput().shown(full[:1000], full.encode(), "bash.txt"))
    assert SHOWN < len(text) < SHOWN + 200
    assert "characters left out" in text


def test_event_loop_is_free_while_a_long_output_is_rendered() -> None:
    async def check() -> int:
        drawing = asyncio.ensure_future(TerminalOutput().shown("\x1b[5;5Hx\x1b[K" * 60_000, None, "bash.txt"))
        n_turns = 0
        while not drawing.done():
            await asyncio.sleep(0.001)
            n_turns += 1
        await drawing
        return n_turns

    assert asyncio.run(check()) > 3
