"""A persistent bash for a model: whatever a command does, the next one works, in the same directory if that exists."""

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
from workers.sandboxes.processes.entry import SandboxEntry
from workers.sandboxes.processes.process_tree import Lineage, kill_tagged, new_tag
from workers.sandboxes.shell.shell_protocol import CommandEnd
from workers.sandboxes.shell.shell_session import ShellSession
from workers.sandboxes.shell.terminal import MAX_LINE
from workers.sandboxes.shell.waiting_programs import ProgramActivity, doing, members

START_S = 30.0
RESTORE_S = 10.0
GENTLE = ((b"\x03", 1.0), (b"\x03", 0.5), (b"\x1c", 0.5))
"""Keys that are typed at the time limit, and seconds that each may take: ^C, ^C, ^backslash."""
BRISK = ((b"\x03", 0.3), (b"\x1c", 0.3))
"""The same for a program that is used interactively, which may well live on after ^C."""
KILLS_S, KILL_S, MOST_KILLS_S, ENOUGH_S, ENOUGH_KILLS = 1.0, 0.1, 10.0, 0.2, 10
"""Seconds for which what runs is killed again and again, and how often at least. Seconds that its shell waits for a
processor do not count, until it has had enough of it to see the end of its program."""
LAST_S = 0.5
CHECK_INTERVAL_S = 0.02
SILENCE_S = 0.15
"""Seconds of silence after which an interactive program that may be waiting for a key counts as waiting."""

LOST_S, MAX_LOOK_S, LOST_LOOKS = 0.05, 1.0, 3
"""Least and most seconds between checks of a running command; number of checks after which an idle shell is lost."""
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
        """Start it. Raises SandboxError if it does not come up."""
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
                f"the program does not read: it took {n_typed} of {len(keys)} bytes; end it, or wait for it"
            )
        left_s = max(0.0, deadline - asyncio.get_running_loop().time())
        return await self._look(session, left_s, False, more=not keys, typed=bool(keys))

    async def close(self) -> None:
        """End the shell and the jobs it left. Harmless when repeated."""
        if self._session is not None:
            lineage = self._lineage(self._session.pid)
            self._session.close()
            self._session = None
            await asyncio.to_thread(kill_tagged, self._mark, lineage)

    def _lineage(self, pid: int) -> Lineage | None:
        """Return where all that this shell started is to be found; None if that is not known."""
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
        """Watch the program that has the terminal until it ends, waits for its user, or these seconds have passed."""
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
        """Return the result of a command that has ended or could not be ended, with a shell that works again."""
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
        note = _REDIRECTED if not (output or restarted) and session.redirected else ""
        return ShellResult(code, output, self._cwd, timed_out, restarted, n_dropped, full, limit=limit, note=note)

    async def _end_interactive(self) -> bool:
        """End what still runs and drop its last output; return whether the shell had to be replaced."""
        self._interactive = False
        if self._lost:
            return False
        session = self._open_session()
        self._lost = True
        ended = session.ended or await self._interrupt(session, BRISK)
        return (await self._result(session, ended, False)).restarted

    async def _interrupt(self, session: ShellSession, gently: Sequence[tuple[bytes, float]]) -> CommandEnd | None:
        """End what runs and keep the shell; by SIGKILL only if what is typed does not work."""
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
        # where this process itself had no processor, time passes with few tries
        while (spent_s := loop.time() - began) < MOST_KILLS_S and (spent_s < limit_s or n_kills < ENOUGH_KILLS):
            n_kills += 1
            _kill_foreground(session)
            # a loop goes on to its next command
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
        """Start a new bash in the directory, and with the exported variables, of the old one."""
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
            # what the old one left may use up a limit, such as that of processes
            await asyncio.to_thread(kill_tagged, self._mark)
            await self._start()
        self._lost = False
        folder = f"cd -- {shlex.quote(cwd)}" if cwd else ""
        if not await self._restored(f"{self._exported}\n{folder}"):
            # what was exported keeps the shell from working, as a read-only PS2 does
            self._exported = ""
            self._open_session().close()
            await self._start()
            await self._restored(folder)

    async def _restored(self, script: str) -> bool:
        """Restore a state in a new shell by a script; return whether that shell still works."""
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
        raise ToolError(f"the command holds {half}, half of a pair of surrogates, which is no character") from None


async def _settled(session: ShellSession, seconds: float) -> CommandEnd | None:
    """Return the command's end, None if it has not ended within so many seconds. A lost shell has ended, too."""
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
    """Wait until the command ends or waits for its user. With `more`, silence counts only after some output.

    What was `typed` may still be on its way to the terminal; when it arrives, its echo shows that.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while (left := deadline - loop.time()) > 0:
        if ended := await session.settled(min(CHECK_INTERVAL_S, left)):
            return ended
        silence_s = loop.time() - session.heard_at
        if silence_s < CHECK_INTERVAL_S or (more and not session.n_waiting) or not session.has_terminal:
            continue
        program_activity = doing(session.pid, session.terminal.foreground_group(), session.terminal.name)
        reads = program_activity is ProgramActivity.READING and (session.n_waiting > 0 or not typed)
        waits = reads or (program_activity is not ProgramActivity.BUSY and silence_s > SILENCE_S)
        # one that was typed to, and has not run since, does not wait yet; what it wrote before may be on its way
        if waits and not session.terminal.has_unread() and not session.catch_up():
            break
    return session.ended


async def _type(session: ShellSession, keys: bytes, deadline: float) -> int:
    """Type as the terminal takes it, until the deadline or the program's end; return the number of bytes taken."""
    loop = asyncio.get_running_loop()
    n_typed = 0
    while n_typed < len(keys) and session.ended is None:
        n_typed += (n := session.type(keys[n_typed:]))
        if not n and (loop.time() > deadline or await session.settled(CHECK_INTERVAL_S)):
            break
    return n_typed


def _processor_s(pid: int) -> tuple[float, float]:
    """Return the seconds that a process has used a processor and has waited for one; zeros if it is gone."""
    try:
        used, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(used) / 1e9, int(waited) / 1e9


def _kill_foreground(session: ShellSession) -> None:
    """Send SIGKILL to what runs in the foreground; the shell itself and jobs in the background stay."""
    for pid in members(session.pid, session.terminal.foreground_group()):
        if pid != session.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
