"""The head of a farm on a cluster: Postgres, Redis, API, page and Flower on one machine, as children of one process.

Persistent data are in the shared folder, so any machine that mounts it can be the head. After a head has ended, however
it ended, another can follow: with the same data, at a new address, which nodes read from the folder.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from farm.embedded.child_process import ChildProcess
from farm.embedded.embedded_farm import API_PORT, flower_command
from farm.embedded.farm_processes import StartedFarm
from farm.embedded.node_folder import own_folder
from farm.embedded.own_redis import start_redis_at
from farm.home import own_key, written_once
from farm.launch.head_claim import HeadClaim
from farm.launch.own_postgres import OwnPostgres
from farm.launch.shared_address import SharedAddress, bracketed, environment, first_address, own_address, write_address
from farm.launch.slurm_commands import has_slurm
from farm.launch.slurm_keeper import SlurmKeeper
from farm.settings import Settings
from farm.store import migrations
from farm.store.access.sealed_secrets import FILE as SECRET_KEY_FILE
from farm.store.database import Store

log = logging.getLogger(__name__)

_POSTGRES_PORT, _REDIS_PORT, _FLOWER_PORT = 5432, 6379, 5555
_STOP_S = 8.0
"""Seconds that each part gets to end; Slurm kills the job in 30."""


class ClusterHead(StartedFarm):
    """`with ClusterHead(...)` once `claim` is held; `address` is where it listens. Raises the errors of its parts.

    `host` is this machine's name or address as reachable from others; empty: detected.
    """

    def __init__(self, settings: Settings, folder: Path, claim: HeadClaim, host: str = "", flower: bool = True) -> None:
        self.folder = folder
        self.address = SharedAddress("")
        self.store_name = ""
        """The address of the database, for display."""
        self._settings = settings
        self._claim = claim
        self._host = host or own_address()
        self._flower = flower
        self._ending = threading.Event()
        self._keeper: SlurmKeeper | None = None
        self._redis = own_folder(settings.scratch, "redis", str(folder))
        super().__init__(folder / "logs")

    def _start(self) -> None:
        known = first_address(self.folder)
        self.address = replace(known, head="", own=(), flower_url="")
        # clients must not connect to the address of a killed head
        write_address(self.folder, self.address)
        address = replace(
            self.address, api_key=own_key(self._settings), secret_key=self._secret_key(), head=secrets.token_hex(8)
        )
        address = self._with_store(address, known)
        address = self._with_broker(address, known)
        port = self._port(known.api_url, API_PORT)
        self.address = address = replace(address, api_url=f"http://{bracketed(self._host)}:{port}")
        self._processes.add("api", partial(self._start_api, port))
        if self._flower:
            port = self._port(known.flower_url, _FLOWER_PORT)
            self.address = address = replace(address, flower_url=f"http://{bracketed(self._host)}:{port}")
            self._processes.add("flower", partial(self._start_flower, port))
        self._processes.keep_up()
        write_address(self.folder, address)
        if has_slurm():
            self._keeper = SlurmKeeper(self.folder, address.farm_id, address.store_url, f"head/{address.head}")
            self._keeper.start()

    def _with_store(self, address: SharedAddress, known: SharedAddress) -> SharedAddress:
        """Return the address with the database's: the site's, or the head's own, which is started."""
        if self._settings.store_url:
            address = replace(address, store_url=self._settings.store_url)
        else:
            logs = self._processes.logs
            logs.mkdir(exist_ok=True)
            postgres = OwnPostgres(self.folder, self._settings.scratch, address.password, logs / "postgres.log")
            postgres.make(self._claim.lock_fd)
            if self._claim.from_elsewhere:
                postgres.forget_other_machine()
            port = self._port(known.store_url, _POSTGRES_PORT)
            going_on: Callable[[], bool] = lambda: not self._ending.is_set() and not self._claim.lost  # noqa: E731
            self._processes.add("postgres", partial(postgres.start, port, self._claim.lock_fd, going_on))
            address = replace(address, store_url=postgres.url(self._host, port), own=(*address.own, "store"))
        store = Store(address.store_url)
        try:
            migrations.migrate(store)
            self.store_name = store.name
        finally:
            store.close()
        return address

    def _with_broker(self, address: SharedAddress, known: SharedAddress) -> SharedAddress:
        if self._settings.broker_url:
            return replace(address, broker_url=self._settings.broker_url)
        port = self._port(known.broker_url, _REDIS_PORT)
        log_file = self._processes.logs / "redis.log"
        self._processes.add("redis", partial(start_redis_at, port, address.password, self._redis, log_file))
        url = f"redis://:{address.password}@{bracketed(self._host)}:{port}/0"
        return replace(address, broker_url=url, own=(*address.own, "broker"))

    def _secret_key(self) -> str:
        """Return the key for stored secrets, which nodes read with the address."""
        return self._settings.secret_key or written_once(self.folder / SECRET_KEY_FILE, secrets.token_urlsafe(32))

    def _start_api(self, port: int) -> ChildProcess:
        argv = [sys.executable, "-m", "farm.cli.main", "api", "--host", "0.0.0.0", "--port", str(port)]  # noqa: S104
        log_file = self._processes.logs / "api.log"
        return ChildProcess(argv, env=self._env(), log=log_file, on_parent_death=signal.SIGTERM)

    def _start_flower(self, port: int) -> ChildProcess:
        argv = flower_command(port, "0.0.0.0")  # noqa: S104 - it requires the key
        return ChildProcess(argv, env=self._env(), log=self._processes.logs / "flower.log")

    def _port(self, known_url: str, usual: int) -> int:
        """Return a free port: the previous one, so that clients find it again, else the usual one."""
        try:
            before = urlsplit(known_url).port if known_url else None
        except ValueError:
            before = None
        return self._processes.port(before or usual, "0.0.0.0")  # noqa: S104 - where it will listen

    def _env(self) -> dict[str, str]:
        return environment(self.address) | {
            "FARM_HOME": str(self.folder),
            "FARM_SCRATCH": str(self._settings.scratch.absolute()),
        }

    def stop(self) -> None:
        """End everything, the database last. May be repeated."""
        self._ending.set()
        if self._keeper is not None:
            self._keeper.stop()
        # its fast shutdown: SIGTERM would wait for every client of the farm
        self._processes.stop(_STOP_S, {"postgres": signal.SIGINT, "flower": signal.SIGKILL})
        shutil.rmtree(self._redis, ignore_errors=True)
        if self.address.head and not self._claim.lost:
            write_address(self.folder, replace(self.address, head=""))
