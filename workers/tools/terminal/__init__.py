"""Output of commands as a terminal shows it: the last frame of progress bars, no colours, no erased text.

This is the only place where commands' output becomes the policy's input. The original bytes are kept as an artefact if
some of their text is not shown.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from workers.plugins.interfaces import Artefact
from workers.tools.terminal.screen import Screen, drawn, has_controls

TEXT = "text/plain"
SHOWN = 200_000
"""Maximum characters shown of a command's output."""

_DRAWN = 1_000_000
"""Maximum characters to write to a screen, which takes up to a second of CPU."""

_LONG = 20_000
"""Number of characters, with control characters among them, that take milliseconds to write to a screen."""


class Shown(NamedTuple):
    """The shown text of an output, and the artefacts. `as_written`: the text is the output itself."""

    text: str
    artefacts: tuple[Artefact, ...]
    as_written: bool


class TerminalOutput:
    """The output of one command, or of one interactive program, in any number of pieces."""

    def __init__(self) -> None:
        self._screen: Screen | None = None

    async def shown(self, output: str, full: bytes | None, name: str) -> Shown:
        """Return the text that a terminal shows for an output, and the artefact to keep, if any, under this name.

        `full` is the whole output, if longer. For a program that draws on its own screen, like an editor, the whole
        screen is shown in each call. Long texts are processed in a thread.
        """
        artefacts = () if full is None else (Artefact(name, TEXT, full),)
        if self._screen is None and not has_controls(output):
            return Shown(output, artefacts, True)
        raw = output if full is None else full.decode("utf-8", "replace")
        part = _cut(raw, _DRAWN)
        text, lost = await asyncio.to_thread(self._drawn, part) if len(part) > _LONG else self._drawn(part)
        if lost and not artefacts:
            artefacts = (Artefact(name, TEXT, raw.encode("utf-8", "replace")),)
        return Shown(_cut(text, SHOWN), artefacts, False)

    def _drawn(self, text: str) -> tuple[str, bool]:
        screen, self._screen = self._screen or Screen(), None
        drawing = drawn(text, screen)
        if screen.alternate:
            self._screen = screen
        return drawing


def _cut(text: str, limit: int) -> str:
    """Return head and tail of a text longer than the limit, with a line between them that says so."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
