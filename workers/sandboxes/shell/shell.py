"""A persistent bash for a model: after any command, the next one works, in the same directory if it still exists."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

from farm.errors import SandboxError, ToolError
from workers.plugins.interfaces import ShellResult
from workers.sandboxes.processes.process_tree import Lineage, kill_tagged, new_tag
from workers.sandboxes.processes.sandbox_process import SandboxEntry
from workers.sandboxes.shell.shell_protocol import CommandEnd
from workers.sandboxes.shell.shell_session import ShellSession
from workers.sandboxes.shell.terminal import MAX_LINE, ProgramActivity, doing, members

START_S = 30.0
RESTORE_S = 10.0
GENTLE = ((b"\x03", 1.0), (b"\x03", 0.5), (b"\x1c", 0.5))
"""Keys typed at the time limit, with the seconds to wait after each: ^C, ^C, ^backslash."""
BRISK = ((b"\x03", 0.3), (b"\x1c", 0.3))
"""The same for an interactive program, which often survives ^C."""
KILLS_S, KILL_S, MOST_KILLS_S, ENOUGH_S, ENOUGH_KILLS = 1.0, 0.1, 10.0, 0.2, 10
"""Minimum time and number of attempts to kill the foreground processes repeatedly. Time in which the shell waits for a
CPU does not count, until it has had enough CPU time to notice the end of its program."""
_POLL_S = 0.02
SILENCE_S = 0.15
"""Silence after which an interactive program that may be waiting for a key counts as waiting, in seconds."""

LOST_S, MAX_LOOK_S, LOST_LOOKS = 0.05, 1.0, 3
"""Minimum and maximum interval between checks of a running command; number of checks until an idle shell is lost."""
_REDIRECTED = "the output of this shell goes elsewhere, by an `exec` with a redirection; `exit` gives a new shell"


class BashShell:
    """See `workers.plugins.interfaces.Shell`. Made by `open`; one command at a time."""

    def __init__(self, entry: SandboxEntry) -> None:
        self._entry = entry
        self._notices = entry.notices()
        self._mark = new_tag()
        self._session: ShellSession | None = None
        self._cwd = ""
        self._exported = ""
        # after a cancelled command the state of the shell is unknown
        self._lost = False
        self._interactive = False

    @classmethod
    async def open(cls, entry: SandboxEntry) -> BashShell:
        """Start the shell. Raises SandboxError if that fails."""
        shell = cls(entry)
        await shell._start()
        return shell

    async def run(self, command: str, timeout_s: float, *, interactive: bool = False) -> ShellResult:
        """See `workers.plugins.interfaces.Shell.run`. A NUL ends the command, as it ends a program's argument."""
        data = _encoded(command).partition(b"\0")[0]
        restarted = self._interactive and await self._end_interactive()
        if self._lost or self._session is None or not self._session.alive:
            restarted = True
            await self._restart()
        session = self._open_session()
        self._lost = True
        self._notices.take()
        session.send(data, typed=interactive)
        if interactive:
            return await self._look(session, timeout_s, restarted)
        ended = await _settled(session, timeout_s)
        if ended is not None:
            return await self._result(session, ended, restarted)
        ended = await self._interrupt(session, GENTLE)
        return await self._result(session, ended, restarted, timed_out=True)

    async def send(self, keys: bytes, wait_s: float) -> ShellResult:
        """See `workers.plugins.interfaces.Shell.send`."""
        if not self._interactive or self._lost:
            raise ToolError("no interactive program is running: start one first")
        session = self._open_session()
        if session.terminal.takes_lines() and max(map(len, keys.replace(b"\r", b"\n").split(b"\n"))) > MAX_LINE:
            raise ToolError(f"a terminal takes lines of at most {MAX_LINE} bytes: send shorter ones, or use a file")
        self._lost = True
        deadline = asyncio.get_running_loop().time() + wait_s
        n_typed = await _type(session, keys, deadline)
        if n_typed < len(keys) and session.ended is None:
            self._lost = False
            raise ToolError(
                f"the program does not read its input: it took {n_typed} of {len(keys)} bytes; end it, or wait for it"
            )
        left_s = max(0.0, deadline - asyncio.get_running_loop().time())
        return await self._look(session, left_s, False, more=not keys, typed=bool(keys))

    async def close(self) -> None:
        """End the shell and its background jobs. Harmless when repeated."""
        if self._session is not None:
            lineage = self._lineage(self._session.pid)
            self._session.close()
            self._session = None
            await asyncio.to_thread(kill_tagged, self._mark, lineage)

    def _lineage(self, pid: int) -> Lineage | None:
        try:
            return Lineage(pid, self._entry.target()["pid"])
        except SandboxError:
            return None

    def _open_session(self) -> ShellSession:
        assert self._session
        return self._session

    async def _look(
        self, session: ShellSession, seconds: float, restarted: bool, *, more: bool = False, typed: bool = False
    ) -> ShellResult:
        """Watch the program in the foreground until it ends, waits for input, or the time is up."""
        ended = await _attended(session, seconds, more, typed)
        self._interactive = ended is None
        if ended is not None:
            return await self._result(session, ended, restarted)
        self._lost = False
        output, n_dropped, full = session.take()
        return ShellResult(None, output, self._cwd, False, restarted, n_dropped, full, running=True)

    async def _result(
        self, session: ShellSession, ended: CommandEnd | None, restarted: bool, *, timed_out: bool = False
    ) -> ShellResult:
        """Return the result of a command that has ended or could not be ended. The shell works again afterwards."""
        self._lost = False
        output, n_dropped, full = session.take()
        if ended is None or not ended.alive:
            restarted = True
            await self._restart()
        else:
            self._cwd = ended.cwd
        code = None if ended is None or timed_out else ended.code
        # the code does not show the limit if the command continued after a process was killed
        limit = self._notices.take(code)
        note = _REDIRECTED if not (output or restarted) and session.redirected else ""
        return ShellResult(code, output, self._cwd, timed_out, restarted, n_dropped, full, limit=limit, note=note)

    async def _end_interactive(self) -> bool:
        self._interactive = False
        if self._lost:
            return False
        session = self._open_session()
        self._lost = True
        ended = session.ended or await self._interrupt(session, BRISK)
        return (await self._result(session, ended, False)).restarted

    async def _interrupt(self, session: ShellSession, gently: Sequence[tuple[bytes, float]]) -> CommandEnd | None:
        """End the running command and keep the shell. Uses SIGKILL only if the typed keys do not work."""
        session.terminal.hide()
        if (group := session.terminal.foreground_group()) > 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGCONT)
        for keys, patience_s in gently:
            session.interrupt(keys)
            if ended := await session.settled(patience_s):
                return ended
        loop = asyncio.get_running_loop()
        began, (used_s, waited_s) = loop.time(), _processor_s(session.pid)
        limit_s, n_kills = KILLS_S, 0
        # if this process itself gets no CPU time, time passes with few attempts
        while (spent_s := loop.time() - began) < MOST_KILLS_S and (spent_s < limit_s or n_kills < ENOUGH_KILLS):
            n_kills += 1
            _kill_foreground(session)
            # a shell loop continues with its next command
            session.interrupt(b"\x03")
            if ended := await session.settled(KILL_S):
                return ended
            used_now_s, waited_now_s = _processor_s(session.pid)
            limit_s = KILLS_S + (waited_now_s - waited_s if used_now_s - used_s < ENOUGH_S else 0.0)
        return None

    async def _start(self) -> None:
        session = await ShellSession.start(self._entry, self._mark)
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
            # processes of the old shell may use up a limit, such as that of processes
            await asyncio.to_thread(kill_tagged, self._mark)
            await self._start()
        self._lost = False
        folder = f"cd -- {shlex.quote(cwd)}" if cwd else ""
        if not await self._restored(f"{self._exported}\n{folder}"):
            # an exported variable breaks the shell, e.g. a read-only PS2
            self._exported = ""
            self._open_session().close()
            await self._start()
            await self._restored(folder)

    async def _restored(self, script: str) -> bool:
        session = self._open_session()
        session.send(script.encode("utf-8", "surrogateescape"))
        ended = await _settled(session, RESTORE_S)
        session.take()
        if ended is None or not ended.alive:
            return False
        self._cwd = ended.cwd
        return True


def _encoded(command: str) -> bytes:
    try:
        return command.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        half = ascii(command[error.start])
        raise ToolError(f"the command contains {half}, half of a surrogate pair, which is not a character") from None


async def _settled(session: ShellSession, seconds: float) -> CommandEnd | None:
    """Return the command's end, or None if it is still running after `seconds`. A lost shell counts as ended."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    pause_s, n_lost = LOST_S, 0
    while (ended := await session.settled(min(pause_s, max(0.0, deadline - loop.time())))) is None:
        n_lost = n_lost + 1 if session.lost() else 0
        if n_lost == LOST_LOOKS:
            return CommandEnd(1, "", alive=False)
        if loop.time() >= deadline:
            return None
        pause_s = LOST_S if n_lost else min(2 * pause_s, MAX_LOOK_S)
    return ended


async def _attended(session: ShellSession, seconds: float, more: bool, typed: bool) -> CommandEnd | None:
    """Wait until the command ends or waits for input. With `more`, silence counts only after some output.

    `typed` keys may still be on their way to the terminal; their echo shows that they have arrived.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while (left := deadline - loop.time()) > 0:
        if ended := await session.settled(min(_POLL_S, left)):
            return ended
        silence_s = loop.time() - session.received_at
        if silence_s < _POLL_S or (more and not session.n_waiting) or not session.has_terminal:
            continue
        program_activity = doing(session.pid, session.terminal.foreground_group(), session.terminal.name)
        reads = program_activity is ProgramActivity.READING and (session.n_waiting > 0 or not typed)
        waits = reads or (program_activity is not ProgramActivity.BUSY and silence_s > SILENCE_S)
        # a program that has unread input and has not run since is not waiting; its earlier output may still arrive
        if waits and not session.terminal.has_unread() and not session.catch_up():
            break
    return session.ended


async def _type(session: ShellSession, keys: bytes, deadline: float) -> int:
    """Type as fast as the terminal accepts keys, until the deadline or the program's end; return the bytes typed."""
    loop = asyncio.get_running_loop()
    n_typed = 0
    while n_typed < len(keys) and session.ended is None:
        n_typed += (n := session.type(keys[n_typed:]))
        if not n and (loop.time() > deadline or await session.settled(_POLL_S)):
            break
    return n_typed


def _processor_s(pid: int) -> tuple[float, float]:
    try:
        used, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(used) / 1e9, int(waited) / 1e9


def _kill_foreground(session: ShellSession) -> None:
    """Send SIGKILL to the foreground processes, but not to the shell and background jobs."""
    for pid in members(session.pid, session.terminal.foreground_group()):
        if pid != session.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
