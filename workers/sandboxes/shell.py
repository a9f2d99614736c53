"""A persistent bash for a model: whatever a command does, the next one works, in the same directory if that exists."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal

from farm.errors import SandboxError
from workers.interfaces import ShellResult
from workers.sandboxes.entry import Entry
from workers.sandboxes.headtail import HeadTail
from workers.sandboxes.marked import kill_carriers, new_mark
from workers.sandboxes.session import OUTPUT_LIMIT, Ended, Session
from workers.sandboxes.terminal import foreground_group

START_S = 30.0
RESTORE_S = 10.0
GENTLE = ((b"\x03", 1.0), (b"\x03", 0.5), (b"\x1c", 0.5))
"""What is typed at the time limit, and how long it may take: ^C, ^C, ^backslash."""
KILL_S = 1.0


class BashShell:
    """See `workers.interfaces.Shell`. Made by `open`; one command at a time."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._mark = new_mark()
        self._session: Session | None = None
        self._cwd = ""
        self._exported = ""
        # after a cancelled command nobody knows what the shell is doing
        self._lost = False

    @classmethod
    async def open(cls, entry: Entry) -> BashShell:
        """Start it. Raises SandboxError if it does not come up."""
        shell = cls(entry)
        await shell._start()
        return shell

    async def run(self, command: str, timeout_s: float) -> ShellResult:
        """See `workers.interfaces.Shell.run`. A NUL in the command ends it there, as in a program's arguments."""
        restarted = self._lost or self._session is None
        if restarted:
            await self._restart()
        assert self._session
        session = self._session
        self._lost = True
        ended = await _within(session.send(command.encode("utf-8", "surrogateescape").split(b"\0")[0]), timeout_s)
        timed_out = ended is None
        if ended is None:
            ended = await self._interrupt(session)
        self._lost = False
        output = session.output
        session.output = HeadTail(OUTPUT_LIMIT)
        if ended is None or not ended.alive:
            restarted = True
            self._cwd = (ended.cwd if ended else "") or self._cwd
            self._exported = (ended.exported if ended else "") or self._exported
            await self._restart()
        else:
            self._cwd = ended.cwd
        code = None if ended is None or timed_out else ended.code
        return ShellResult(code, output.text(), self._cwd, timed_out, restarted, output.n_dropped)

    async def close(self) -> None:
        """End the shell and the jobs it left. Harmless when repeated."""
        if self._session is not None:
            self._session.close()
            self._session = None
            await asyncio.to_thread(kill_carriers, self._mark)

    async def _interrupt(self, session: Session) -> Ended | None:
        """End the running command and keep the shell, the hard way only if the gentle one does not work."""
        current = session.current
        for keys, patience_s in GENTLE:
            with contextlib.suppress(OSError):
                session.terminal.write(keys)
            if ended := await _within(current, patience_s):
                return ended
        group = foreground_group(session.terminal)
        if group > 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
            return await _within(current, KILL_S)
        return None

    async def _start(self) -> None:
        session = Session(self._entry, self._mark)
        try:
            ended = await _within(session.boot(), START_S)
            if ended is None or not ended.alive:
                raise SandboxError(f"sandbox {self._entry.sandbox_id}: no shell: {session.chatter.text().strip()}")
        except BaseException:
            session.close()
            raise
        self._session = session
        self._cwd = self._cwd or ended.cwd

    async def _restart(self) -> None:
        """A new bash in the directory, and with the exported variables, of the old one."""
        if self._session is not None:
            self._session.close()
            self._session = None
        cwd = self._cwd
        await self._start()
        self._lost = False
        assert self._session
        restore = f"{self._exported}\ncd -- {shlex.quote(cwd)}" if cwd else self._exported
        ended = await _within(self._session.send(restore.encode("utf-8", "surrogateescape")), RESTORE_S)
        self._session.output = HeadTail(OUTPUT_LIMIT)
        self._cwd = ended.cwd if ended else self._cwd


async def _within(future: asyncio.Future[Ended], seconds: float) -> Ended | None:
    await asyncio.wait({future}, timeout=seconds)
    return future.result() if future.done() else None
