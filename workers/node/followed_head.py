"""The head that a node follows: awaited, found again after it moves, and if requested, run on this machine.

The node's settings stay the same and lead to the current head. libpq finds Postgres through a service file, which it
reads at each new connection. Redis has no such mechanism, so it is reached through a port on this machine's loopback,
from which a thread forwards to the head: there is little traffic.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

import click

from farm.configuration.config_file import pinned
from farm.embedded.child_process import ChildProcess
from farm.embedded.farm_processes import FarmProcesses
from farm.launch.shared_address import SharedAddress, await_address, own_address, read_address
from farm.settings import choose, settings

log = logging.getLogger(__name__)

_STOP_S = 10.0
_PERIOD_S = 1.0
_CONNECT_S = 5.0
_CHUNK = 65536
_SERVICE_BYTES = 4096


class WayToHead:
    """A node's connection to its head, which may move.

    Create it while the process has one thread; `node_settings` are the node's, `follow` starts forwarding.
    `descriptors` are those that only this process has open for it.
    """

    def __init__(self, folder: Path, address: SharedAddress) -> None:
        self._folder = folder
        self._address = address
        # in memory, under a path that exists as long as this process
        self._service = os.memfd_create("head", os.MFD_CLOEXEC)
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(64)
        self.descriptors = (self._service, self._listener.fileno())
        self._server: asyncio.Server | None = None
        self._lines: set[asyncio.StreamWriter] = set()
        self._write_service()

    def node_settings(self) -> dict[str, str]:
        """Return the values of a node of this farm, by the names of settings."""
        address = self._address
        values = {name: getattr(address, name) for name in ("store_url", "broker_url", "api_key", "secret_key")}
        if "store" in address.own:
            values["store_url"] = f"postgresql+psycopg:///?service=farm-{address.farm_id}"
        if "broker" in address.own:
            port = self._listener.getsockname()[1]
            values["broker_url"] = f"redis://:{address.password}@127.0.0.1:{port}/0"
        own = {"home": str(self._folder), "node_address": own_address()}
        return values | {name: value for name, value in own.items() if name not in settings().model_fields_set}

    def service_variables(self) -> dict[str, str]:
        """Return the variable that makes libpq find the head's Postgres; empty for a Postgres of the site."""
        return {"PGSERVICEFILE": f"/proc/{os.getpid()}/fd/{self._service}"} if "store" in self._address.own else {}

    def follow(self) -> None:
        """Forward from now on, in a thread, and follow the head."""
        loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, args=(loop,), name="way-to-head", daemon=True).start()
        # a separate thread, as a hanging file system must not delay forwarding
        threading.Thread(target=self._watch, args=(loop,), name="head-watch", daemon=True).start()

    def _write_service(self) -> None:
        """Write the location of Postgres, padded to one length, so that a concurrent reader gets the old or the new."""
        if "store" not in self._address.own:
            return
        url = urlsplit(self._address.store_url)
        fields = {
            "host": url.hostname,
            "port": url.port,
            "user": url.username,
            "password": unquote(url.password or ""),
            "dbname": url.path.lstrip("/"),
        }
        lines = [f"[farm-{self._address.farm_id}]", *(f"{name}={value}" for name, value in fields.items())]
        text = "\n".join(lines).encode() + b"\n"
        os.pwrite(self._service, text.ljust(_SERVICE_BYTES, b"\n"), 0)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        self._server = loop.run_until_complete(asyncio.start_server(self._line, sock=self._listener))
        loop.run_forever()

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        known = self._address.head
        while True:
            time.sleep(_PERIOD_S)
            address = read_address(self._folder)
            if address is not None and address.head not in ("", known):
                known = address.head
                loop.call_soon_threadsafe(self._move, address)

    def _move(self, address: SharedAddress) -> None:
        log.warning("Head changed to %s; reconnecting", urlsplit(address.api_url).netloc)
        self._address = address
        self._write_service()
        for writer in self._lines:
            # its peer may be a machine that is gone, which would never answer
            writer.transport.abort()

    async def _line(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection, both ways, until either side closes it."""
        broker = urlsplit(self._address.broker_url)
        self._lines.add(writer)
        try:
            opening = asyncio.open_connection(broker.hostname, broker.port)
            far_reader, far_writer = await asyncio.wait_for(opening, _CONNECT_S)
        except (OSError, TimeoutError):
            writer.transport.abort()
            self._lines.discard(writer)
            return
        self._lines.add(far_writer)
        for each in (writer, far_writer):
            each.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            for each in (writer, far_writer):
                self._lines.discard(each)
                each.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


class FollowedHead:
    """`with FollowedHead(folder, standby)` waits for a head and chooses the settings for it; a signal ends the wait.

    With `standby`, a head of this machine stands by. It ends after the node, which hands its work back to it.
    """

    def __init__(self, folder: Path, standby: bool) -> None:
        self._folder = folder.absolute()
        self._processes = FarmProcesses(self._folder / "logs")
        self._name = f"head-{settings().node}"
        # the environment without a head: a restarted head would otherwise take its own servers for the site's
        self._env = {**os.environ, **pinned(), "FARM_HOME": str(self._folder)}
        self._standby = standby
        self._ended = threading.Event()
        self._way: WayToHead | None = None

    def __enter__(self) -> Self:
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, lambda *_: self._ended.set()) for number in numbers}
        if self._standby:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._processes.add(self._name, self._start_head)
        try:
            address = await_address(self._folder, lambda text: click.echo(text, err=True), going_on=self._goes_on)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        if address is not None:
            self._way = WayToHead(self._folder, address)
            os.environ |= self._way.service_variables()
            choose(**self._way.node_settings())
        return self

    def __exit__(self, *error: object) -> None:
        self._processes.stop(_STOP_S, {self._name: signal.SIGINT})

    @property
    def reached(self) -> bool:
        """False if a signal came before there was a head."""
        return self._way is not None

    @property
    def descriptors(self) -> Sequence[int]:
        """The descriptors that the node's other processes must not inherit."""
        assert self._way is not None
        return self._way.descriptors

    def follow(self) -> None:
        """Follow the head from now on, in threads."""
        assert self._way is not None
        self._way.follow()
        self._processes.keep_up()

    def _goes_on(self) -> bool:
        self._processes.restart_ended()
        return not self._ended.is_set()

    def _start_head(self) -> ChildProcess:
        argv = [sys.executable, "-m", "farm.cli.main", "head", "--dir", str(self._folder), "--standby", "--of-node"]
        log = self._processes.logs / f"{self._name}.log"
        return ChildProcess(argv, env=self._env, log=log, on_parent_death=signal.SIGINT)
