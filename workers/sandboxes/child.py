"""One command joined to a sandbox, awaited on the event loop by its pidfd: no thread and no signal handler."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType

from workers.sandboxes.marked import kill_joined

_CHUNK = 1 << 18


class Collector:
    """Reads a pipe as it fills; keeps at most `limit` bytes and counts nothing more, so that no writer ever waits."""

    def __init__(self, limit: int) -> None:
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
        self.data += chunk[: max(0, self._limit - len(self.data))]
        if not chunk:
            self._loop.remove_reader(self._read_end)
        return bool(chunk)

    def finish(self) -> bytes:
        """All that was written by now; later output of processes that were left running is not waited for."""
        while self._read():
            pass
        return bytes(self.data)

    def close(self) -> None:
        self._loop.remove_reader(self._read_end)
        os.close(self._read_end)


class Child:
    """A started process; leave its context to have it killed and waited for. `code` is as of `subprocess`."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int = subprocess.DEVNULL,
        stdout: int = subprocess.DEVNULL,
        stderr: int = subprocess.DEVNULL,
        pass_fds: Sequence[int] = (),
    ) -> None:
        # without preexec_fn and user=, Popen forks by vfork: 2 ms however large the worker is
        self._process = subprocess.Popen(
            argv, env=env, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=pass_fds, start_new_session=True
        )
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._pidfd, self._note_end)

    def _note_end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._process.wait()
        if not self._ended.done():
            self._ended.set_result(None)

    async def wait(self) -> int:
        """Its exit code once it has ended, negative for a signal."""
        await asyncio.shield(self._ended)
        return self._process.wait()

    def kill(self) -> None:
        """End the command, if it runs."""
        if self._process.returncode is None:
            kill_joined(self.pid)

    def close(self) -> None:
        """Kill it if it runs, and forget it. Waits for the moment that a killed process needs to be gone."""
        self._loop.remove_reader(self._pidfd)
        self.kill()
        self._process.wait()
        os.close(self._pidfd)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
