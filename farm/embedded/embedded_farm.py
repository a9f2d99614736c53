"""A farm on one machine with nothing installed: SQLite, a private Redis on a Unix socket, one node, API and Flower.

All parts are children of the process that starts it, and end with it, however it ends. A part that ends earlier is
restarted at its address. Results stay in the farm's home; `farm.connect(home)` finds them even when nothing runs.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

from farm.configuration.config_file import pinned
from farm.embedded.child_process import ChildProcess
from farm.embedded.farm_processes import FarmProcesses, StartedFarm, last_lines
from farm.embedded.node_folder import locked, own_folder
from farm.embedded.own_redis import start_redis
from farm.errors import ServiceError
from farm.home import ADDRESS_FILE, own_file, own_home, own_key, write_own
from farm.scheduler.broker import check_broker
from farm.settings import DATABASE_FILE, Settings
from farm.store import migrations, nodes
from farm.store.database import Store

log = logging.getLogger(__name__)

API_PORT = 8600
"""The port of the API, if free."""
FLOWER_USER = "farm"
"""Flower's user; the password is the farm's key."""
_START_S = 120.0
_STOP_S = 30.0
_POLL_S = 0.1


class Embedded(StartedFarm):
    """The farm of one home folder. `with Embedded(settings) as farm:` runs it; nothing is left running afterwards.

    `node_options` are those of `farm node`, such as `["--run", "64"]`. When it is stopped, running rollouts go back to
    the queue at once, unless `--grace` or the settings allow time. A separate thread restarts a part that ends, at the
    same address; `check` raises if that failed. Raises Conflict if the farm runs already.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        node_options: Sequence[str] = (),
        flower: bool = True,
        api: bool = False,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.home = settings.home.absolute()
        self.logs = self.home / "logs"
        self.store_url = settings.database_url
        self.broker_url = settings.broker_url
        self.flower_url = ""
        self.api_url = ""
        self._settings = settings
        grace_s = settings.grace_s if "grace_s" in settings.model_fields_set else 0.0
        # of options that are given twice, the last counts
        self._node_options = ["--grace", f"{grace_s:g}", *node_options]
        self._with_flower = flower
        self._with_api = api
        self._own_env = dict(env or {})
        self._lock: IO[str] | None = None
        self._redis: Path | None = None
        super().__init__(self.logs)

    def _start(self) -> None:
        own_home(self.home)
        message = f"a farm runs in {self.home} already; stop it, or choose another FARM_HOME"
        self._lock = locked(self.home / "lock", message)
        self._processes = FarmProcesses(self.logs)
        if self.broker_url:
            check_broker(self.broker_url)
        if not self._settings.store_url:
            # for its owner only; SQLite gives its other files the same mode
            own_file(self.home / DATABASE_FILE)
        store = Store(self.store_url)
        try:
            migrations.migrate(store)
        finally:
            store.close()
        if not self.broker_url:
            self._redis = own_folder(self._settings.scratch, "redis", str(self.home))
            self._processes.add("redis", self._start_redis)
        address = {"store_url": self.store_url, "broker_url": self.broker_url}
        write_own(self.home / ADDRESS_FILE, json.dumps(address))
        self._await_node(self._processes.add("node", self._start_node).child)
        if self._with_flower:
            port = self._processes.port()
            self._processes.add("flower", partial(self._start_flower, port))
            self.flower_url = f"http://127.0.0.1:{port}"
        if self._with_api:
            port = self._processes.port(API_PORT)
            self._processes.add("api", partial(self._start_api, port))
            self.api_url = f"http://127.0.0.1:{port}"
        self._processes.keep_up()

    def _start_redis(self) -> ChildProcess:
        assert self._redis is not None
        child, self.broker_url = start_redis(self._redis, self.logs / "redis.log")
        return child

    def _start_node(self) -> ChildProcess:
        argv = [sys.executable, "-m", "workers.node", *self._node_words()]
        return ChildProcess(argv, env=self._env(), log=self.logs / "node.log", on_parent_death=signal.SIGTERM)

    def _node_words(self) -> list[str]:
        return ["--log-dir", str(self.logs), *self._node_options]

    def _start_flower(self, port: int) -> ChildProcess:
        env = self._env() | {"FARM_API_KEY": own_key(self._settings)}
        return ChildProcess(flower_command(port), env=env, log=self.logs / "flower.log")

    def _start_api(self, port: int) -> ChildProcess:
        argv = [sys.executable, "-m", "farm.cli.main", "api", "--port", str(port)]
        return ChildProcess(argv, env=self._env(), log=self.logs / "api.log", on_parent_death=signal.SIGTERM)

    def _env(self) -> dict[str, str]:
        address = {
            "FARM_HOME": str(self.home),
            "FARM_STORE_URL": self.store_url,
            "FARM_BROKER_URL": self.broker_url,
            "FARM_SCRATCH": str(self._settings.scratch.absolute()),
        }
        # a part uses this farm's home, which may have another file
        return os.environ | pinned() | self._own_env | address

    def _await_node(self, child: ChildProcess) -> None:
        store = Store(self.store_url)
        deadline = time.monotonic() + _START_S
        try:
            while not any(node.info.get("supervisor") == child.pid for node in store.read(nodes.listing)):
                if not child.running or time.monotonic() > deadline:
                    raise ServiceError(f"the node did not start{last_lines(self.logs / 'node.log')}")
                time.sleep(_POLL_S)
        finally:
            store.close()

    def stop(self) -> None:
        """End everything: the node releases its rollouts and removes its sandboxes, then the rest. May be repeated."""
        self._processes.stop(_STOP_S + _grace_s(self._node_options))
        if self._redis is not None:
            shutil.rmtree(self._redis, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _grace_s(node_options: Sequence[str]) -> float:
    values = re.findall(r"--grace[= ](\d+(?:\.\d+)?)", " ".join(node_options))
    return float(values[-1]) if values else 0.0


def flower_command(port: int, address: str = "127.0.0.1") -> list[str]:
    """Return the command for a read-only Flower on the farm's broker; user FLOWER_USER, password FARM_API_KEY."""
    # the last one opens a task's page
    columns = "name,args,state,result,runtime,worker,received,uuid"
    return [
        *(sys.executable, "-m", "celery", "-A", "workers.queue.app", "flower"),
        *(f"--address={address}", f"--port={port}", "--read-only=true", "--max-tasks=20000"),
        f"--tasks-columns={columns}",
        f"--conf={Path(__file__).with_name('flower_config.py')}",
    ]
