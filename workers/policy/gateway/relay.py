"""Runs a command in a sandbox together with a relay from a local TCP port to the gateway's Unix socket.

    python -c RELAY SOCKET KEY MARK FILES COMMAND...

It needs only Python and nothing of the farm: its source is passed to the sandbox's interpreter. Relay and command end
together, and both end when the gateway does, with all processes that the command started, as nothing may change while
the result is scored. Environment variables point the vendors' clients to the port. Before the command starts, the
address replaces MARK in its arguments, in its environment and in the files named by FILES, a JSON list.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

_CHUNK = 65536
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def variables(base: str, key: str) -> dict[str, str]:
    """Return the environment variables for clients: the API's address and key; `base` is without `/v1`."""
    # The image may set a proxy, which cannot reach a local port.
    direct = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), "127.0.0.1"]))
    return {
        "NO_PROXY": direct,
        "no_proxy": direct,
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": key,
        "GOOGLE_GEMINI_BASE_URL": base,
        "GEMINI_API_KEY": key,
    }


async def relay(path: str) -> asyncio.Server:
    """Listen on a free port; forward each connection to a new connection to the socket."""
    return await asyncio.start_server(partial(_connect, path), "127.0.0.1", 0, backlog=512)


async def _connect(path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    # A handler cancelled at the end of the program would be reported among the agent's last lines.
    with contextlib.suppress(OSError, asyncio.CancelledError), contextlib.closing(writer):
        socket_reader, socket_writer = await asyncio.open_unix_connection(path)
        with contextlib.closing(socket_writer):
            await asyncio.gather(_pump(reader, socket_writer), _pump(socket_reader, writer))


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Forward all data, then the end of file. A failed write means that the peer has disconnected."""
    try:
        while data := await source.read(_CHUNK):
            target.write(data)
            await target.drain()
        target.write_eof()
    except OSError:
        target.transport.abort()


def _end_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_descendants() -> None:
    """Kill and reap all descendants; as the subreaper, this process also gets orphans."""
    while pids := _children():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    pids = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            pids += [int(pid) for pid in (thread / "children").read_text().split()]
    return pids


async def _end_with(gateway: asyncio.StreamReader, child: asyncio.subprocess.Process) -> None:
    """Kill the command once the gateway closes its connection, on which no data is ever sent."""
    with contextlib.suppress(OSError):
        await gateway.read()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def fill(files: list[str], mark: str, base: str) -> None:
    """Replace a mark in files by the address."""
    for name in files:
        path = Path(name)
        text = path.read_bytes()
        if mark.encode() in text:
            path.write_bytes(text.replace(mark.encode(), base.encode()))


async def run(path: str, key: str, mark: str, files: list[str], command: list[str]) -> int:
    """Run the command with a relay; return its exit code, as a shell does."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    server = await relay(path)
    port = server.sockets[0].getsockname()[1]
    base = f"http://127.0.0.1:{port}/t/{key}"
    fill(files, mark, base)
    given = {name: value.replace(mark, base) for name, value in os.environ.items()}
    environment = {**given, **variables(base, key)}
    command = [word.replace(mark, base) for word in command]
    gateway, lifeline = await asyncio.open_unix_connection(path)
    child = await asyncio.create_subprocess_exec(
        *command, env=environment, preexec_fn=_end_with_parent, start_new_session=True
    )
    watching = asyncio.ensure_future(_end_with(gateway, child))
    code = await child.wait()
    watching.cancel()
    lifeline.close()
    return code if code >= 0 else 128 - code


def main() -> None:
    try:
        path, key, mark, files, *command = sys.argv[1:]
        code = asyncio.run(run(path, key, mark, json.loads(files), command))
    finally:
        _end_descendants()
    sys.exit(code)


if __name__ == "__main__":
    main()
