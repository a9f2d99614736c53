"""One process inside a sandbox, awaited on the event loop without threads or signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from farm.errors import SandboxError, ToolError
from farm.records.request import SandboxLimits
from workers.config import SandboxConfig
from workers.sandboxes import cgroups
from workers.sandboxes.processes.fork_client import ForkReplies
from workers.sandboxes.resource_exhaustion import reason

if TYPE_CHECKING:
    from workers.sandboxes.isolation.namespaces import JoinTarget


START_S = 60.0
_CHUNK = 1 << 18

_FILE = "notices"
_SIGNALS = {signal.SIGXCPU: "CPU time limit reached", signal.SIGXFSZ: "file size limit reached"}

MAX_WORD = 131_071
"""Maximum size of one argument or variable in bytes: the kernel's MAX_ARG_STRLEN without the NUL."""
ALL_WORDS = 2_000_000
"""Maximum size of all words in bytes: the kernel allows a quarter of the stack limit, usually 8 MB."""


@contextlib.contextmanager
def memory_file(data: bytes) -> Iterator[int]:
    """Yield a descriptor to read `data` from. It is a memory file, because a pipe would need a writer."""
    descriptor = os.memfd_create("data")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


class OutputPipe:
    """A pipe that is read on the event loop as it fills. `write_end` is for a program; close it after it was passed on.

    `_read` is called when there is something to read, and at the end of all writers.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._loop.add_reader(self._read_end, self._read)

    def _read(self) -> object:
        raise NotImplementedError

    def close_write_end(self) -> None:
        """Close it here, so that the end of the writers can be noticed. Harmless when repeated."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close(self) -> None:
        """Close the pipe; later writers get SIGPIPE. Harmless when repeated."""
        self.close_write_end()
        if self._read_end >= 0:
            self._loop.remove_reader(self._read_end)
            os.close(self._read_end)
            self._read_end = -1


class Collector(OutputPipe):
    """Keeps at most `limit` bytes of a pipe, the first or the `last` ones; reads on, so that no writer blocks."""

    def __init__(self, limit: int, *, last: bool = False) -> None:
        self._last = last
        self.data = bytearray()
        self._limit = limit
        super().__init__()

    def _read(self) -> bool:
        try:
            chunk = os.read(self._read_end, _CHUNK)
        except BlockingIOError:
            return False
        if self._last:
            self.data += chunk
            # not at each chunk, because all kept bytes are moved
            if len(self.data) > 2 * self._limit:
                del self.data[: -self._limit]
        else:
            self.data += chunk[: max(0, self._limit - len(self.data))]
        if not chunk:
            self._loop.remove_reader(self._read_end)
        return bool(chunk)

    def finish(self) -> bytes:
        """Return the output written so far, without waiting for processes that still run."""
        while (self._last or len(self.data) < self._limit) and self._read():
            pass
        return bytes(self.data)


class SandboxProcess:
    """A process in a sandbox, killed by `close`. `pid` is its number on the host."""

    def __init__(self, answers: ForkReplies, sandbox_id: str) -> None:
        self.pid = 0
        self._answers = answers
        self._sandbox_id = sandbox_id
        self._pidfd = -1
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int | None] = self._loop.create_future()

    @classmethod
    async def started(cls, answers: ForkReplies, sandbox_id: str) -> SandboxProcess:
        """Return the process once it is inside. Raises SandboxError if the sandbox or the fork server is gone."""
        child = cls(answers, sandbox_id)
        try:
            async with asyncio.timeout(START_S):
                message, descriptors = await answers.next()
            if "pid" not in message:
                raise refused(message, sandbox_id)
            if not descriptors:
                raise SandboxError(f"sandbox {sandbox_id} could not be entered: {reason(OSError(errno.EMFILE, ''))}")
        except TimeoutError:
            answers.close()
            raise SandboxError(f"sandbox {sandbox_id} could not be entered within {START_S:.0f} s") from None
        except BaseException:
            # closing this end of the socket kills the process as soon as it is inside
            answers.close()
            raise
        child.pid, child._pidfd = message["pid"], descriptors[0]
        child._loop.add_reader(answers.fileno(), child._note_end)
        return child

    def _note_end(self) -> None:
        message = self._answers.take()
        if message is None:
            return
        self._loop.remove_reader(self._answers.fileno())
        if not self._ended.done():
            self._ended.set_result(message[0].get("code"))

    @property
    def ended(self) -> asyncio.Future[int | None]:
        """Done once it has ended, with the exit code: negative for a signal, None if unknown."""
        return self._ended

    async def wait(self) -> int:
        """Wait for its end and return the exit code, negative for a signal. Raises SandboxError if it is unknown."""
        code = await asyncio.shield(self._ended)
        if code is None:
            raise SandboxError(f"sandbox {self._sandbox_id}: the process that watched a program in it was killed")
        return code

    async def wait_within(self, timeout_s: float) -> int | None:
        """Wait like `wait`; return None if it still runs after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.wait()
        except TimeoutError:
            return None

    def signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL; its children continue."""
        self.signal(signal.SIGKILL)

    def close(self) -> None:
        """Kill it if it runs, and release its resources. Harmless when repeated."""
        if self._pidfd < 0:
            return
        self.kill()
        self._loop.remove_reader(self._answers.fileno())
        self._answers.close()
        os.close(self._pidfd)
        self._pidfd = -1


def refused(message: dict[str, object], sandbox_id: str) -> SandboxError:
    """Return the error for an answer without a result."""
    if "gone" in message:
        return SandboxError(f"sandbox {sandbox_id} is gone: its first process has ended")
    return SandboxError(
        f"sandbox {sandbox_id} could not be entered: {message.get('error', 'the fork server was killed')}"
    )


class SandboxEntry(Protocol):
    """Starts processes inside a sandbox."""

    config: SandboxConfig
    sandbox_id: str
    socket_folder: Path
    workdir: str

    async def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        fds: Mapping[int, int],
        terminal: bool = False,
        cwd: str | None = None,
        limits: SandboxLimits | None = None,
    ) -> SandboxProcess:
        """Start a program as session leader, with the caller's descriptors (values) as its own (keys).

        Missing descriptors of 0, 1 and 2 are /dev/null. With `terminal`, descriptor 0 is its controlling terminal.
        Raises SandboxError if the sandbox is gone.
        """

    def target(self, limits: SandboxLimits | None = None) -> JoinTarget:
        """Return the data that a process of the farm needs to join the sandbox itself."""

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]: ...

    def notices(self) -> LimitEvents:
        """Return the sandbox's limit events from now on."""

    async def read_file(self, path: str) -> bytes: ...


class LimitEvents:
    """The limits noted in a sandbox's folder since this object's creation (or `from_start`) or the last `take`."""

    def __init__(self, state: Path, cgroup: str = "", *, from_start: bool = False) -> None:
        self._path = str(state / _FILE)
        self._n_read = 0 if from_start else self._size()
        self._cgroup = cgroup
        self._n_killed = cgroups.n_killed(cgroup) if cgroup and not from_start else 0

    def _size(self) -> int:
        # called twice per command, and the file rarely exists: this is the cheapest test
        return os.stat(self._path).st_size if os.access(self._path, os.F_OK) else 0  # noqa: PTH116

    def take(self, code: int | None = 0) -> str:
        """Return the reached limits in words, including those shown by the exit `code` of a command; empty if none."""
        limits = []
        size = self._size()
        if size > self._n_read:
            with Path(self._path).open() as file:
                file.seek(self._n_read)
                limits = file.read(size - self._n_read).splitlines()
            self._n_read = size
        # the kernel counts before it kills, so the reason is available when the end is noticed
        n_killed = cgroups.n_killed(self._cgroup) if self._cgroup else 0
        if n_killed > self._n_killed:
            limits.append(f"memory limit of {cgroups.memory_mb(self._cgroup)} MB reached")
            self._n_killed = n_killed
        if code:
            number = -code if code < 0 else code - 128
            limits += [words for name, words in _SIGNALS.items() if name == number]
        return "; ".join(dict.fromkeys(limits))


def check_words(argv: Sequence[str], env: Mapping[str, str], cwd: str | None) -> None:
    """Raise ToolError, with the problem and the word, if no program can be started with these arguments."""
    if isinstance(argv, str) or not argv:
        raise ToolError("a command is a list of words and needs at least the program's name; the list is empty")
    if not argv[0]:
        raise ToolError("the first word of a command is the program's name; it is empty")
    n_bytes = 0
    for what, word in _words(argv, env, cwd):
        n_bytes += _size(what, word) + 1
    if n_bytes > ALL_WORDS:
        raise ToolError(f"a command takes {ALL_WORDS} bytes of words at most, not {n_bytes}: use a file or the input")


def _words(argv: Sequence[str], env: Mapping[str, str], cwd: str | None) -> Iterator[tuple[str, str]]:
    yield from ((f"word {number} of the command", word) for number, word in enumerate(argv))
    for name, value in env.items():
        if not isinstance(name, str) or not name or "=" in name:
            raise ToolError(f"{name!r:.60} is not a valid name of a variable")
        yield f"the variable {name!r:.60}", f"{name}={value}" if isinstance(value, str) else value
    if cwd is not None:
        yield "the working folder", cwd


def _size(what: str, word: str) -> int:
    if not isinstance(word, str):
        raise ToolError(f"{what} must be text, not {type(word).__name__}")
    if "\0" in word:
        raise ToolError(f"{what} contains a NUL, which ends a word")
    try:
        n_bytes = len(word.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError as error:
        raise ToolError(f"{what} contains {word[error.start]!a}, half of a surrogate pair") from None
    if n_bytes > MAX_WORD:
        raise ToolError(f"{what} has {n_bytes} bytes; a program takes {MAX_WORD}: use a file or the input")
    return n_bytes
