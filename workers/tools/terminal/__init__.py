"""Output of commands as a terminal shows it: of progress bars the last frame, no colours, nothing that was erased.

This is the one place where the output of commands becomes what a policy reads. The bytes as they were written are kept
as an artefact where some of their text is not shown.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from workers.plugins.interfaces import Artefact
from workers.tools.terminal.screen import Screen, drawn, has_controls

TEXT = "text/plain"
SHOWN = 200_000
"""Most characters that are shown of the output of a command."""

_DRAWN = 1_000_000
"""Most characters that are written to a screen, which takes up to a second of a processor."""

_LONG = 20_000
"""Characters with control characters among them that take milliseconds to be written to a screen."""


class Shown(NamedTuple):
    """The text that is shown of an output, and the artefacts. `as_written` says that the text is the output itself."""

    text: str
    artefacts: tuple[Artefact, ...]
    as_written: bool


class TerminalOutput:
    """The output of one command, or of one program that a policy types to, in any number of pieces."""

    def __init__(self) -> None:
        self._screen: Screen | None = None

    async def shown(self, output: str, full: bytes | None, name: str) -> Shown:
        """Return what a terminal shows of an output, and the artefact to keep, if any, by this name.

        `full` is all of the output, if that is longer. Of a program that draws on a screen of its own, as editors do,
        the whole screen is shown from call to call. Long texts are worked on in a thread.
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
        result = drawn(text, screen)
        if screen.alternate:
            self._screen = screen
        return result


def _cut(text: str, limit: int) -> str:
    """Return head and tail of a text that is longer than the limit, with a line between them that says so."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
