"""A persistent bash for a model: whatever a command does, the next one works, in the same directory if that exists."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
from collections.abc import Sequence

from farm.errors import SandboxError, ToolError
from workers.interfaces import ShellResult
from workers.sandboxes.entry import Entry
from workers.sandboxes.marked import kill_carriers, new_mark
from workers.sandboxes.protocol import Ended
from workers.sandboxes.session import Session
from workers.sandboxes.terminal import LONGEST_LINE
from workers.sandboxes.waiting import Doing, doing, members

START_S = 30.0
RESTORE_S = 10.0
GENTLE = ((b"\x03", 1.0), (b"\x03", 0.5), (b"\x1c", 0.5))
"""What is typed at the time limit, and how long it may take: ^C, ^C, ^backslash."""
BRISK = ((b"\x03", 0.3), (b"\x1c", 0.3))
"""The same for a program that is used interactively, which may well live on after ^C."""
KILLS, KILL_S = 10, 0.1
LAST_S = 0.5
LOOK_S = 0.02
SILENCE_S = 0.15
"""An interactive program that is silent for so long, and may be waiting for a key, is taken to wait for one."""


class BashShell:
    """See `workers.interfaces.Shell`. Made by `open`; one command at a time."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._notices = entry.notices()
        self._mark = new_mark()
        self._session: Session | None = None
        self._cwd = ""
        self._exported = ""
        # after a cancelled command nobody knows what the shell is doing
        self._lost = False
        self._interactive = False

    @classmethod
    async def open(cls, entry: Entry) -> BashShell:
        """Start it. Raises SandboxError if it does not come up."""
        shell = cls(entry)
        await shell._start()
        return shell

    async def run(self, command: str, timeout_s: float, *, interactive: bool = False) -> ShellResult:
        """See `workers.interfaces.Shell.run`. A NUL in the command ends it there, as in a program's arguments."""
        restarted = self._interactive and await self._end_interactive()
        if self._lost or self._session is None or not self._session.alive:
            restarted = True
            await self._restart()
        session = self._open_session()
        self._lost = True
        self._notices.take()
        session.send(command.encode("utf-8", "surrogateescape").partition(b"\0")[0], typed=interactive)
        if interactive:
            return await self._look(session, timeout_s, restarted)
        ended = await session.settled(timeout_s)
        if ended is not None:
            return await self._result(session, ended, restarted)
        ended = await self._interrupt(session, GENTLE)
        return await self._result(session, ended, restarted, timed_out=True)

    async def send(self, keys: bytes, wait_s: float) -> ShellResult:
        """See `workers.interfaces.Shell.send`."""
        if not self._interactive or self._lost:
            raise ToolError("no interactive program is running: start one first")
        session = self._open_session()
        if session.terminal.takes_lines() and max(map(len, keys.replace(b"\r", b"\n").split(b"\n"))) > LONGEST_LINE:
            raise ToolError(f"a terminal takes lines of at most {LONGEST_LINE} bytes: send shorter ones, or use a file")
        self._lost = True
        deadline = asyncio.get_running_loop().time() + wait_s
        n_typed = await _type(session, keys, deadline)
        if n_typed < len(keys) and session.ended is None:
            self._lost = False
            raise ToolError(
                f"the program does not read: it took {n_typed} of {len(keys)} bytes; end it, or wait for it"
            )
        return await self._look(session, max(0.0, deadline - asyncio.get_running_loop().time()), False, more=not keys)

    async def close(self) -> None:
        """End the shell and the jobs it left. Harmless when repeated."""
        if self._session is not None:
            self._session.close()
            self._session = None
            await asyncio.to_thread(kill_carriers, self._mark)

    def _open_session(self) -> Session:
        assert self._session
        return self._session

    async def _look(self, session: Session, seconds: float, restarted: bool, *, more: bool = False) -> ShellResult:
        """How far what has the terminal is, once it has ended, waits for its user, or so many seconds have gone by."""
        ended = await _attended(session, seconds, more)
        self._interactive = ended is None
        if ended is not None:
            return await self._result(session, ended, restarted)
        self._lost = False
        output, n_dropped, full = session.take()
        return ShellResult(None, output, self._cwd, False, restarted, n_dropped, full, running=True)

    async def _result(
        self, session: Session, ended: Ended | None, restarted: bool, *, timed_out: bool = False
    ) -> ShellResult:
        """What came of a command that has ended, or was not to be ended, with a shell that works again."""
        self._lost = False
        output, n_dropped, full = session.take()
        if ended is None or not ended.alive:
            restarted = True
            await self._restart()
        else:
            self._cwd = ended.cwd
        code = None if ended is None or timed_out else ended.code
        # a command may go on after what was killed
        limit = self._notices.take(code)
        return ShellResult(code, output, self._cwd, timed_out, restarted, n_dropped, full, limit=limit)

    async def _end_interactive(self) -> bool:
        """What still runs must go, and its last words with it; whether the shell had to go too."""
        self._interactive = False
        if self._lost:
            return False
        session = self._open_session()
        self._lost = True
        ended = session.ended or await self._interrupt(session, BRISK)
        return (await self._result(session, ended, False)).restarted

    async def _interrupt(self, session: Session, gently: Sequence[tuple[bytes, float]]) -> Ended | None:
        """End what runs and keep the shell, the hard way only if the gentle one does not work."""
        session.terminal.hide()
        if (group := session.terminal.foreground_group()) > 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGCONT)
        for keys, patience_s in gently:
            session.interrupt(keys)
            if ended := await session.settled(patience_s):
                return ended
        for _ in range(KILLS):
            _kill_foreground(session)
            # a loop goes on to its next command
            session.interrupt(b"\x03")
            if ended := await session.settled(KILL_S):
                return ended
        return None

    async def _start(self) -> None:
        session = await Session.start(self._entry, self._mark)
        try:
            ended = await session.settled(START_S)
            if ended is None or not ended.alive:
                raise SandboxError(f"sandbox {self._entry.sandbox_id}: no shell: {session.chatter.strip()}")
        except BaseException:
            session.close()
            raise
        self._session = session
        self._cwd = self._cwd or ended.cwd

    async def _restart(self) -> None:
        """A new bash in the directory, and with the exported variables, of the old one."""
        if self._session is not None:
            if (last := self._session.ended) is not None:
                self._cwd = last.cwd or self._cwd
                self._exported = last.exported or self._exported
            self._session.close()
            self._session = None
        cwd = self._cwd
        try:
            await self._start()
        except SandboxError:
            # what the old one left may hold all that there is to have, such as processes
            await asyncio.to_thread(kill_carriers, self._mark)
            await self._start()
        self._lost = False
        session = self._open_session()
        restore = f"{self._exported}\ncd -- {shlex.quote(cwd)}" if cwd else self._exported
        session.send(restore.encode("utf-8", "surrogateescape"))
        ended = await session.settled(RESTORE_S)
        session.take()
        self._cwd = ended.cwd if ended else self._cwd


async def _attended(session: Session, seconds: float, more: bool) -> Ended | None:
    """Watch as a person would. With `more`, something must have been written before silence counts."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while (left := deadline - loop.time()) > 0:
        if ended := await session.settled(min(LOOK_S, left)):
            return ended
        silence_s = loop.time() - session.heard_at
        if silence_s < LOOK_S or (more and not session.n_waiting) or not session.has_terminal:
            continue
        found = doing(session.pid, session.terminal.foreground_group(), session.terminal.name)
        waits = found is Doing.READING or (found is not Doing.BUSY and silence_s > SILENCE_S)
        # what it wrote before it began to wait may still be on its way
        if waits and not session.catch_up():
            break
    return session.ended


async def _type(session: Session, keys: bytes, deadline: float) -> int:
    """Type as the terminal takes it, until the deadline or the program's end: how many bytes it took."""
    loop = asyncio.get_running_loop()
    n_typed = 0
    while n_typed < len(keys) and session.ended is None:
        n_typed += (n := session.type(keys[n_typed:]))
        if not n and (loop.time() > deadline or await session.settled(LOOK_S)):
            break
    return n_typed


def _kill_foreground(session: Session) -> None:
    """SIGKILL to what runs in the foreground; the shell itself stays, and jobs in the background do."""
    for pid in members(session.pid, session.terminal.foreground_group()):
        if pid != session.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
