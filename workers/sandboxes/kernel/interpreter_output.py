"""The output of an interpreter and its children, read continuously in bounded memory, so it survives their end."""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import termios

from farm.settings import settings
from workers.sandboxes.processes.command_output import CommandOutput

SHOWN = 200_000
"""Maximum size of a cell's output that is returned, in bytes."""
KEPT = 4_000_000
"""Maximum size of longer output that is kept on disk, in bytes."""
_BURST = 64_000_000
_PORTION = 1_000_000
_PAUSE_S = 0.01
"""Pause between portions of a cell's output after the burst: endless output blocks its writer, not the worker."""
_CHUNK = 65_536


class InterpreterOutput:
    """A pipe, read on the event loop. `write_end` is for the interpreter; close it here after it was passed on."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._folder = settings().scratch
        self._kept = self._new_output()
        self._allowed = _BURST
        self._resume: asyncio.TimerHandle | None = None
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._loop.add_reader(self._read_end, self._read)

    def _read(self) -> None:
        try:
            n_read = self._read_chunk(_CHUNK)
        except BlockingIOError:
            # it was taken before this was called
            return
        self._allowed -= n_read
        if not n_read:
            # all write ends are closed
            self._loop.remove_reader(self._read_end)
        elif self._allowed <= 0:
            self._allowed = _PORTION
            self._loop.remove_reader(self._read_end)
            self._resume = self._loop.call_later(_PAUSE_S, self._loop.add_reader, self._read_end, self._read)

    def _read_chunk(self, n_bytes: int) -> int:
        chunk = os.read(self._read_end, n_bytes)
        self._kept.add(chunk)
        return len(chunk)

    def take(self) -> tuple[str, int, bytes | None]:
        """Return the output since the last call, the number of bytes dropped in its middle, and the full output if any.

        A pipe is ordered, so everything written before this call is included.
        """
        # only what has arrived by now, because a background process may write without end
        waiting = array.array("i", [0])
        fcntl.ioctl(self._read_end, termios.FIONREAD, waiting)
        if waiting[0]:
            self._read_chunk(waiting[0])
        kept, self._kept, self._allowed = self._kept, self._new_output(), _BURST
        taken = kept.data().decode("utf-8", "replace"), kept.n_dropped, kept.full()
        kept.close()
        return taken

    def _new_output(self) -> CommandOutput:
        return CommandOutput(SHOWN, KEPT, self._folder)

    def close_write_end(self) -> None:
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close(self) -> None:
        """Close the pipe; later writers get SIGPIPE. Harmless when repeated."""
        self.close_write_end()
        self._kept.close()
        if self._resume is not None:
            self._resume.cancel()
        if self._read_end >= 0:
            self._loop.remove_reader(self._read_end)
            os.close(self._read_end)
            self._read_end = -1
