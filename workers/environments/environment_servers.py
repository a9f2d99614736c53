"""Warm environment servers: one sandbox per environment and set of packages, for all rollouts.

The first rollout that needs a server starts it, off that rollout's clock. It is stopped after a period without
rollouts, or with its worker. A dead server is replaced.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

from farm.errors import HandlerError, SandboxError
from farm.ids import owned_sandbox_id
from workers.environments import environment_server
from workers.environments.computing_calls import can_filter
from workers.environments.environment_program import FOLDER, SOCKET, SOCKET_FOLDER, EnvironmentProgram
from workers.environments.episode import MAX_LINE_BYTES, EpisodeConnection
from workers.plugins.interfaces import ExecResult, Sandbox, SandboxProvider
from workers.plugins.plugin_faults import described
from workers.stage_clock import off_clock

START_S = 300.0
"""Time limit for a server's imports; the installation of its packages has its own limits."""
IDLE_S = 600.0

_NEVER_S = 30 * 86_400.0
_POLL_S = 0.02
_INSTALL_S = 2000.0
_LAST_BYTES = 2000

log = logging.getLogger(__name__)


@dataclass(slots=True)
class EnvironmentServer:
    """A running server and its connected episodes."""

    sandbox: Sandbox
    command: asyncio.Future[ExecResult]
    episodes: set[EpisodeConnection] = field(default_factory=set)
    idle: asyncio.TimerHandle | None = None

    @property
    def alive(self) -> bool:
        return not self.command.done()

    def ended(self) -> None:
        """Notify all episodes that the server has ended."""
        for episode in self.episodes:
            episode.cut()

    async def stop(self) -> None:
        """Stop it with its sandbox."""
        if self.idle is not None:
            self.idle.cancel()
        self.command.cancel()
        await asyncio.gather(self.command, return_exceptions=True)
        await self.sandbox.stop()


_Key = tuple[str, EnvironmentProgram, tuple[str, ...]]


class EnvironmentServers:
    """The servers of one event loop."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._servers: dict[_Key, asyncio.Task[EnvironmentServer]] = {}
        self._stopping: set[asyncio.Future[None]] = set()

    async def connect(
        self, program: EnvironmentProgram, provider: SandboxProvider, packages: Sequence[str] = ()
    ) -> EpisodeConnection:
        """Return a new episode of an environment. Raises SandboxError, or HandlerError if its server does not start."""
        try:
            if not program.shared or not can_filter():
                server = await self._wait(asyncio.ensure_future(_start(program, provider, packages)), is_own=True)
                try:
                    return await self._connection(program, server, partial(self._stop, server), shared=False)
                except OSError:
                    self._stop(server)
                    raise
            try:
                return await self._shared(program, provider, packages)
            except OSError:
                # It has just died, unnoticed so far.
                return await self._shared(program, provider, packages)
        except OSError as error:
            raise HandlerError(f"environment {program.name}: its server is gone: {described(error)}") from error

    async def _shared(
        self, program: EnvironmentProgram, provider: SandboxProvider, packages: Sequence[str]
    ) -> EpisodeConnection:
        key = (provider.kind, program, tuple(sorted(packages)))
        starting = self._servers.get(key)
        if starting is None or (starting.done() and not (_is_started(starting) and starting.result().alive)):
            starting = self._servers[key] = asyncio.ensure_future(_start(program, provider, packages, shared=True))
        server = await self._wait(starting)
        if server.idle is not None:
            server.idle.cancel()
        try:
            return await self._connection(program, server, partial(self._release, key, server), shared=True)
        except OSError:
            self._drop(key, server)
            raise

    async def aclose(self) -> None:
        """Stop all servers."""
        for starting in self._servers.values():
            starting.cancel()
        ended = await asyncio.gather(*self._servers.values(), return_exceptions=True)
        self._servers.clear()
        servers = [each for each in ended if isinstance(each, EnvironmentServer)]
        await asyncio.gather(*(each.stop() for each in servers), *self._stopping, return_exceptions=True)

    async def _wait(self, starting: asyncio.Future[EnvironmentServer], is_own: bool = False) -> EnvironmentServer:
        """Wait off the rollout's clock; the end of the rollout does not cancel a start that others may wait for."""
        with off_clock(_INSTALL_S + START_S):
            try:
                return await asyncio.shield(starting)
            except asyncio.CancelledError:
                if is_own:
                    starting.add_done_callback(self._stop_started)
                raise

    def _stop_started(self, starting: asyncio.Future[EnvironmentServer]) -> None:
        if not starting.cancelled() and starting.exception() is None:
            self._stop(starting.result())

    async def _connection(
        self, program: EnvironmentProgram, server: EnvironmentServer, released: Callable[[], None], *, shared: bool
    ) -> EpisodeConnection:
        reader, writer = await _connected(server.sandbox.socket_folder)
        connection = EpisodeConnection(program.name, reader, writer)
        connection.shared = shared

        def dropped() -> None:
            server.episodes.discard(connection)
            released()

        connection.released = dropped
        server.episodes.add(connection)
        if not server.alive:
            connection.cut()
        return connection

    def _release(self, key: _Key, server: EnvironmentServer) -> None:
        if server.episodes:
            return
        if server.alive:
            server.idle = asyncio.get_running_loop().call_later(self._idle_s, self._drop, key, server)
        else:
            self._drop(key, server)

    def _drop(self, key: _Key, server: EnvironmentServer) -> None:
        starting = self._servers.get(key)
        if starting is not None and _is_started(starting) and starting.result() is server:
            del self._servers[key]
        self._stop(server)

    def _stop(self, server: EnvironmentServer) -> None:
        stopping = asyncio.ensure_future(server.stop())
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)


def _is_started(starting: asyncio.Future[EnvironmentServer]) -> bool:
    return starting.done() and not starting.cancelled() and starting.exception() is None


async def _start(
    program: EnvironmentProgram, provider: SandboxProvider, packages: Sequence[str], *, shared: bool = False
) -> EnvironmentServer:
    try:
        spec = program.spec(packages)
    except ValueError as error:
        raise HandlerError(f"environment {program.name}: {described(error)}", retryable=False) from error
    sandbox = await provider.start(owned_sandbox_id("shared"), spec)
    command: asyncio.Future[ExecResult] | None = None
    try:
        for path, source in program.sources().items():
            await sandbox.write_file(f"{FOLDER}/{path}", await asyncio.to_thread(source.read_bytes))
        settings = json.dumps({"imports": program.imports, "memory_mb": program.memory_mb, "shared": shared})
        argv = ["python3", "-m", environment_server.__name__, f"{SOCKET_FOLDER}/{SOCKET}", program.module]
        command = asyncio.ensure_future(sandbox.exec([*argv, program.qualname, settings], timeout_s=_NEVER_S))
        await _up(program, sandbox, command)
        server = EnvironmentServer(sandbox, command)
        command.add_done_callback(lambda done: server.ended())
        return server
    except BaseException:
        if command is not None:
            command.cancel()
        await asyncio.shield(sandbox.stop())
        raise


async def _up(program: EnvironmentProgram, sandbox: Sandbox, command: asyncio.Future[ExecResult]) -> None:
    try:
        async with asyncio.timeout(START_S):
            while not (sandbox.socket_folder / SOCKET).exists():
                done, _ = await asyncio.wait({command}, timeout=_POLL_S)
                if done:
                    raise _not_started(program, command)
    except TimeoutError:
        raise HandlerError(f"environment {program.name}: its imports took longer than {START_S:g} s") from None


def _not_started(program: EnvironmentProgram, command: asyncio.Future[ExecResult]) -> HandlerError | SandboxError:
    if isinstance(error := command.exception(), SandboxError):
        return error
    if error is not None:
        return HandlerError(f"environment {program.name}: its server did not start: {described(error)}")
    result = command.result()
    lines = result.stderr[-_LAST_BYTES:].decode("utf-8", "replace").strip().splitlines()
    why = " | ".join(lines[-3:]) or f"it ended with code {result.code}"
    return HandlerError(f"environment {program.name}: its server did not start: {why}")


async def _connected(folder: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        # The kernel's limit is 107 bytes.
        path = f"/proc/self/fd/{descriptor}/{SOCKET}"
        return await asyncio.open_unix_connection(path, limit=MAX_LINE_BYTES)
    finally:
        os.close(descriptor)


_all: WeakKeyDictionary[asyncio.AbstractEventLoop, EnvironmentServers] = WeakKeyDictionary()


def environment_servers() -> EnvironmentServers:
    """Return the servers of this event loop."""
    return _all.setdefault(asyncio.get_running_loop(), EnvironmentServers())
