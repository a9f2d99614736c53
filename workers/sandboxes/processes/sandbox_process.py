"""One process inside a sandbox, awaited on the event loop without threads or signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
from types import TracebackType

from farm.errors import SandboxError
from workers.sandboxes.processes.fork_client import ForkReplies
from workers.sandboxes.resource_exhaustion import reason

START_S = 60.0
_CHUNK = 1 << 18


class Collector:
    """Reads a pipe as it fills, so that no writer blocks. Keeps at most `limit` bytes, the first or the `last` ones."""

    def __init__(self, limit: int, *, last: bool = False) -> None:
        self._last = last
        self.data = bytearray()
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._loop.add_reader(self._read_end, self._read)

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

    def close_write_end(self) -> None:
        """Close it after it was passed on, so that the end of the writers can be noticed. Harmless when repeated."""
        if self.write_end >= 0:
            os.close(self.write_end)
            self.write_end = -1

    def close(self) -> None:
        self.close_write_end()
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)

    def __enter__(self) -> Collector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SandboxProcess:
    """A process in a sandbox, killed at the end of its context. `pid` is its number on the host."""

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

    def __enter__(self) -> SandboxProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def refused(message: dict[str, object], sandbox_id: str) -> SandboxError:
    """Return the error for an answer without a result."""
    if "gone" in message:
        return SandboxError(f"sandbox {sandbox_id} is gone: its first process has ended")
    return SandboxError(
        f"sandbox {sandbox_id} could not be entered: {message.get('error', 'the fork server was killed')}"
    )
