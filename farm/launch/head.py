"""The head of a farm on a cluster: Postgres, Redis, API, page and Flower on one machine, as children of one process.

Persistent data are in the shared folder, so any machine that mounts it can be the head. After a head has ended, however
it ended, another can follow: with the same data, at a new address, which nodes read from the folder.

The farm's own Postgres has its binaries, its data folder, and its server as a child process.
"""

from __future__ import annotations

import logging
import os
import pwd
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote, urlsplit

from farm.embedded.child_process import ChildProcess
from farm.embedded.embedded_farm import API_PORT, flower_command
from farm.embedded.farm_processes import StartedFarm, last_lines
from farm.embedded.node_folder import own_folder
from farm.embedded.own_redis import start_redis_at
from farm.errors import NotAllowed, StoreUnavailable
from farm.home import own_key, write_own, written_once
from farm.launch.head_claim import HeadClaim
from farm.launch.shared_address import SharedAddress, bracketed, environment, first_address, own_address, write_address
from farm.launch.slurm_commands import has_slurm
from farm.launch.slurm_keeper import SlurmKeeper
from farm.settings import Settings
from farm.store import migrations
from farm.store.access.sealed_secrets import FILE as SECRET_KEY_FILE
from farm.store.database import Store

USER = "farm"
_DATABASE = "postgres"
_START_S = 300.0
"""Seconds until it answers; after a crash it replays everything since its last checkpoint."""
_POLL_S = 0.05
_SUBSTITUTES = ("postgres", "daemon")
"""Users to run the server as if the farm is root's, as it refuses root; the first that exists."""
_OPTIONS = {
    "unix_socket_directories": "",
    "listen_addresses": "*",
    # a node uses four; unused ones cost nothing
    "max_connections": "1000",
    "shared_buffers": "256MB",
    "max_wal_size": "4GB",
    # a node that comes back after a network failure finds its old sessions gone
    "tcp_keepalives_idle": "15",
}
_ACCESS = "host all all all scram-sha-256\n"

log = logging.getLogger(__name__)

_STOP_S = 8.0
"""Seconds that each part gets to end; Slurm kills the job in 30."""


def postgres_binaries() -> Path | None:
    """Return the folder of `postgres`: that on PATH, else Debian's newest, else the pgserver wheel's; None if none."""
    on_path = shutil.which("initdb")
    folders = [Path(on_path).resolve().parent] if on_path else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_major, reverse=True)
    # found without importing it: its Python layer starts servers itself
    spec = find_spec("pgserver")
    if spec is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent / "pginstall" / "bin")
    return next((each for each in folders if (each / "postgres").is_file() and (each / "initdb").is_file()), None)


def _major(folder: Path) -> int:
    name = folder.parent.name
    return int(name) if name.isdigit() else 0


def binaries_for(user: str | None, binaries: Path, folder: Path) -> Path:
    """Return the binaries, copied into `folder` if `user` cannot read them, such as below /root."""
    if user is None or _runs(binaries / "postgres", user):
        return binaries
    install = binaries.parent
    copied = folder / "package" / install.name
    if not copied.is_dir():
        libraries = install.parent.parent / "pgserver.libs"
        if libraries.is_dir():  # the wheel's binaries look for these next to their package
            shutil.copytree(libraries, folder / libraries.name, dirs_exist_ok=True)
        # renamed when complete, so that a partial copy is never used
        partial = folder / "package.partial"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(install, partial, symlinks=True)
        copied.parent.mkdir(exist_ok=True)
        partial.rename(copied)
    return copied / binaries.name


def _runs(binary: Path, user: str) -> bool:
    try:
        checked = subprocess.run([binary, "--version"], capture_output=True, user=user, cwd="/", check=False)
    except PermissionError:
        return False
    return checked.returncode == 0


def _substitute() -> str | None:
    """Return the user to run as; None for the present one. Raises NotAllowed."""
    if os.geteuid():
        return None
    for name in _SUBSTITUTES:
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise NotAllowed("Postgres does not run as root: start the head as another user, or set FARM_STORE_URL")


class OwnPostgres:
    """The Postgres with its data in `folder`/postgres. Raises StoreUnavailable without binaries, NotAllowed as root."""

    def __init__(self, folder: Path, scratch: Path, password: str, log_file: Path) -> None:
        binaries = postgres_binaries()
        if binaries is None:
            raise StoreUnavailable(
                "there is no Postgres here: install the pgserver package or Debian's postgresql, or set FARM_STORE_URL "
                "to an existing database"
            )
        self.data = folder / "postgres"
        self._password = password
        self._log = log_file
        self._user = _substitute()
        # others may pass through it, but not list it
        self._local = own_folder(scratch, "postgres", str(folder))
        self._binaries = binaries_for(self._user, binaries, self._local)

    def make(self, lock_fd: int) -> None:
        """Create the data folder unless it exists; renamed when complete, so that a partial one is never used.

        The creating program inherits the descriptor of the lock, and ends with this process.
        """
        if self.data.exists():
            return
        partial, secret = self.data.with_name("postgres.partial"), self.data.with_name("postgres.password")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(mode=0o700)
        self._let_pass()
        write_own(secret, f"{self._password}\n")
        for path in (partial, secret):
            if self._user is not None:
                shutil.chown(path, self._user)
        words = [str(self._binaries / "initdb"), "-D", str(partial), "-U", USER, "-A", "scram-sha-256"]
        words += [f"--pwfile={secret}", "-E", "UTF8", "--locale=C"]
        try:
            child = self._child(words, lock_fd, signal.SIGKILL)
            child.end(_START_S)
        finally:
            secret.unlink()
        if child.process.returncode:
            raise StoreUnavailable(f"Postgres could not create its data in {self.data}{last_lines(self._log)}")
        with (partial / "pg_hba.conf").open("a") as access:
            access.write(_ACCESS)
        partial.rename(self.data)

    def url(self, host: str, port: int) -> str:
        return f"postgresql+psycopg://{USER}:{quote(self._password)}@{bracketed(host)}:{port}/{_DATABASE}"

    def start(self, port: int, lock_fd: int, going_on: Callable[[], bool]) -> ChildProcess:
        """Start the server and wait until it answers. It inherits the descriptor of the lock, and so holds it.

        Raises StoreUnavailable if it does not start, or `going_on` becomes false.
        """
        options = [
            part for name, value in {**_OPTIONS, "port": str(port)}.items() for part in ("-c", f"{name}={value}")
        ]
        words = [str(self._binaries / "postgres"), "-D", str(self.data), *options]
        self._let_pass()
        # SIGINT is its fast shutdown, which waits for no client
        child = self._child(words, lock_fd, signal.SIGINT)
        deadline = time.monotonic() + _START_S
        while not self._answers(port):
            if not child.running or time.monotonic() > deadline or not going_on():
                child.send(signal.SIGINT)
                child.end(_START_S if going_on() else 10.0)
                raise StoreUnavailable(f"the farm's Postgres did not start{last_lines(self._log)}")
            time.sleep(_POLL_S)
        return child

    def _child(self, words: Sequence[str], lock_fd: int, on_parent_death: signal.Signals) -> ChildProcess:
        if self._user is not None:
            # a change of user clears the parent-death signal, so it is set again
            as_user = [f"--reuid={self._user}", f"--regid={pwd.getpwnam(self._user).pw_gid}", "--clear-groups"]
            words = ["setpriv", *as_user, f"--pdeathsig={on_parent_death.name.removeprefix('SIG')}", "--", *words]
        return ChildProcess(words, log=self._log, pass_fds=[lock_fd], on_parent_death=on_parent_death)

    def _let_pass(self) -> None:
        """Let the server's user pass through the folder; it reads nothing there."""
        if self._user is not None:
            self.data.parent.chmod(stat.S_IMODE(self.data.parent.stat().st_mode) | 0o011)

    def _answers(self, port: int) -> bool:
        import psycopg

        try:
            with psycopg.connect(
                host="127.0.0.1", port=port, user=USER, password=self._password, dbname=_DATABASE, connect_timeout=5
            ) as connection:
                return connection.execute("SELECT 1").fetchone() == (1,)
        except psycopg.OperationalError:
            return False


_POSTGRES_PORT, _REDIS_PORT, _FLOWER_PORT = 5432, 6379, 5555


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
        # nodes read the key for stored secrets with the address
        secret_key = self._settings.secret_key or written_once(self.folder / SECRET_KEY_FILE, secrets.token_urlsafe(32))
        address = replace(
            self.address, api_key=own_key(self._settings), secret_key=secret_key, head=secrets.token_hex(8)
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
            self._keeper = SlurmKeeper(
                self.folder,
                address.farm_id,
                address.store_url,
                f"head/{address.head}",
                self._settings.node_timeout_s,
            )
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
                # the lock file of the server of a gone machine
                (postgres.data / "postmaster.pid").unlink(missing_ok=True)
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
