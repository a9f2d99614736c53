"""A shell of a borrowed sandbox that knows whether a program has its terminal, and can wait for expected texts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, replace

from farm.errors import Conflict
from farm.records.lending.sandbox_calls import ShellCall, ShellOutput
from workers.plugins.interfaces import Shell, ShellResult
from workers.sandboxes.processes.command_output import SHOWN, HeadTail

_LOOK_S = 0.5
"""Maximum interval between searches through the output of a program that does not pause."""
_KEYS_PER_S = 2000
"""Assumed typing speed: typing this many keys per second takes as long as a slow program needs to read them."""


class LentShell:
    """One call at a time."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._runs = False
        self._unread = ""

    async def answer(self, call: ShellCall) -> ShellOutput:
        """Run a command or type keys. Raises Conflict for keys while no interactive command runs."""
        deadline = asyncio.get_running_loop().time() + call.timeout_s
        if call.keys is None:
            self._runs, self._unread = False, ""
            first_s = call.timeout_s if call.expect is None else min(call.timeout_s, _LOOK_S)
            result = await self._shell.run(call.command, first_s, interactive=call.interactive)
        elif not self._runs:
            raise Conflict("no interactive program is running: start one first")
        else:
            look_s = max(_LOOK_S, len(call.keys) / _KEYS_PER_S)
            first_s = call.timeout_s if call.expect is None else min(call.timeout_s, look_s)
            result = await self._shell.send(call.keys.encode("utf-8", "surrogateescape"), first_s)
        expected = None
        if call.expect is not None:
            result, expected = await self._expected(result, call.expect, deadline)
        elif self._unread:
            result, self._unread = replace(result, output=self._unread + result.output), ""
        self._runs = result.running
        shown = asdict(result)
        # the beginning of a long output, and its end, are enough for a caller
        del shown["full"]
        return ShellOutput(**shown, expected=expected)

    async def _expected(
        self, result: ShellResult, texts: Sequence[str], deadline: float
    ) -> tuple[ShellResult, str | None]:
        """Watch until one of these texts is written, the program has ended, or the time is over.

        Returns the result with the output up to the text, and that text. The output after it is for the next call.
        """
        loop = asyncio.get_running_loop()
        kept, before, n_dropped = HeadTail(SHOWN), "", 0
        longest = max(map(len, texts), default=1)
        new = self._unread + result.output
        while True:
            n_dropped += result.n_dropped
            position, text = _first(before + new, texts)
            end = len(new) if text is None else position + len(text) - len(before)
            kept.add(new[:end].encode("utf-8", "surrogateescape"))
            self._unread = new[end:]
            left_s = deadline - loop.time()
            if text is not None or not result.running or left_s <= 0:
                shown = replace(result, output=kept.text(), n_dropped=n_dropped + kept.n_dropped)
                return shown, text
            # all but the last character of a text may be here already
            before = (before + new)[-(longest - 1) :] if longest > 1 else ""
            result = await self._shell.send(b"", min(left_s, _LOOK_S))
            new = result.output

    async def close(self) -> None:
        """End it with its processes."""
        await self._shell.close()


def _first(output: str, texts: Sequence[str]) -> tuple[int, str | None]:
    """Return which of some texts comes first and where; -1 and None if none occurs."""
    positions = [(position, index) for index, text in enumerate(texts) if (position := output.find(text)) >= 0]
    if not positions:
        return -1, None
    position, index = min(positions)
    return position, texts[index]
