"""A persistent IPython in a sandbox, driven over a socket that it inherits: no port, no path, no Jupyter."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct

from farm.errors import SandboxError
from workers.interfaces import CellResult
from workers.sandboxes.child import Child
from workers.sandboxes.closure import INSIDE, SERVER
from workers.sandboxes.entry import Entry
from workers.sandboxes.marked import MARK, children, kill_carriers, new_mark

OUTPUT_LIMIT = 200_000
"""Bytes of a cell's output that are kept."""
START_S = 60.0
INTERRUPTS_S = (1.0, 1.0)
"""How long a cell may take to end after each SIGINT."""

_HEADER = struct.Struct("!II")
_ENVIRONMENT = {"IPYTHONDIR": "/tmp/.ipython", "PYTHONUNBUFFERED": "", "MPLBACKEND": "Agg"}  # noqa: S108


class Gone(Exception):
    """The process at the other end has ended."""


class _Process:
    """One IPython process."""

    def __init__(self, entry: Entry, mark: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        number = theirs.fileno()
        try:
            argv = entry.enter(["python3", f"{INSIDE}/{SERVER}", str(number), f"{INSIDE}/site"])
            environment = entry.environment({**_ENVIRONMENT, MARK: mark})
            self._child = Child(argv, env=environment, pass_fds=[number])
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()

    async def send(self, code: str) -> None:
        head, body = json.dumps({"limit": OUTPUT_LIMIT}).encode(), code.encode("utf-8", "replace")
        try:
            await self._loop.sock_sendall(self._socket, _HEADER.pack(len(head), len(body)) + head + body)
        except OSError as error:
            raise Gone from error

    async def receive(self) -> tuple[dict[str, str], str]:
        n_head, n_body = _HEADER.unpack(await self._exactly(_HEADER.size))
        # a cell can find the socket if it looks for it, and write anything
        if n_head + n_body > 2 * OUTPUT_LIMIT:
            raise Gone
        head = json.loads(await self._exactly(n_head))
        return head, (await self._exactly(n_body)).decode(errors="replace")

    async def _exactly(self, n_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < n_bytes:
            try:
                chunk = await self._loop.sock_recv(self._socket, n_bytes - len(data))
            except OSError as error:
                raise Gone from error
            if not chunk:
                raise Gone
            data += chunk
        return bytes(data)

    def interrupt(self) -> None:
        """SIGINT to the interpreter, which is the child of the `nsenter` we started."""
        with contextlib.suppress(OSError):
            for pid in children(self._child.pid):
                os.kill(pid, signal.SIGINT)

    def close(self) -> None:
        self._socket.close()
        self._child.close()


class IPythonKernel:
    """See `workers.interfaces.Kernel`. Made by `open`; one cell at a time."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._mark = new_mark()
        self._process: _Process | None = None

    @classmethod
    async def open(cls, entry: Entry) -> IPythonKernel:
        """Start it. Raises SandboxError if the sandbox has no Python, or is gone."""
        kernel = cls(entry)
        await kernel._start()
        return kernel

    async def run(self, code: str, timeout_s: float) -> CellResult:
        """See `workers.interfaces.Kernel.run`. Raises SandboxError if the sandbox is gone."""
        restarted = self._process is None
        if self._process is None:
            await self._start()
        process = self._process
        assert process
        # if this is cancelled, the next cell finds no process and starts one
        self._process = None
        answer = asyncio.ensure_future(self._exchange(process, code))
        try:
            done = await _done_within(answer, timeout_s)
            timed_out = not done
            for patience_s in () if done else INTERRUPTS_S:
                process.interrupt()
                if await _done_within(answer, patience_s):
                    break
            if answer.done() and answer.result() is not None:
                self._process = process
                error, output = answer.result() or ("", "")
                return CellResult(output, error, timed_out, restarted)
        finally:
            if self._process is None:
                answer.cancel()
                await self._drop(process)
        await self._start()
        return CellResult("", "" if timed_out else "Died", timed_out, restarted=True)

    async def _exchange(self, process: _Process, code: str) -> tuple[str, str] | None:
        try:
            await process.send(code)
            head, output = await process.receive()
            return str(head["error"]), output
        except (Gone, ValueError, KeyError, TypeError):
            return None

    async def close(self) -> None:
        """End it and what it started. Harmless when repeated."""
        if self._process is not None:
            process, self._process = self._process, None
            await self._drop(process)

    async def _drop(self, process: _Process) -> None:
        process.close()
        await asyncio.to_thread(kill_carriers, self._mark)

    async def _start(self) -> None:
        process = _Process(self._entry, self._mark)
        try:
            async with asyncio.timeout(START_S):
                await process.receive()
        except (Gone, TimeoutError):
            process.close()
            self._entry.enter([])
            raise SandboxError(f"sandbox {self._entry.sandbox_id}: IPython did not start; is python3 there?") from None
        except BaseException:
            process.close()
            raise
        self._process = process


async def _done_within(future: asyncio.Future[tuple[str, str] | None], seconds: float) -> bool:
    await asyncio.wait({future}, timeout=seconds)
    return future.done()
