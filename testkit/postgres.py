"""A private Postgres on a Unix socket, and a fresh database in it for each test that needs one."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg

from farm.launch.head import binaries_for, postgres_binaries
from testkit.private_server import ORDINARY_USER, Missing, private_folder, running

_USER = "farm"
# a test database may lose everything when the machine crashes
_OPTIONS = {
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "32MB",
    "max_connections": "100",
}


@contextmanager
def postgres_server() -> Iterator[str]:
    """Yield the SQLAlchemy URL of the maintenance database of a new Postgres. Raises Missing."""
    with restartable_postgres(synchronous_commit="off") as server:
        yield server.url


class RestartablePostgres:
    """A Postgres that can be shut down and started again. `url` is that of its maintenance database."""

    def __init__(self, command: Sequence[str | Path], folder: Path, user: str | None) -> None:
        self.url = _url(folder, "postgres")
        self._command = command
        self._folder = folder
        self._user = user
        self._stack = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # SIGINT is Postgres' fast shutdown: it ends sessions that a failed test left open
        log = self._folder / "postgres.log"
        server = running(self._command, lambda: _answers(self._folder), log, stop=signal.SIGINT, user=self._user)
        self._process = self._stack.enter_context(server)

    def cut_down(self) -> None:
        """End it at once, as if the machine had crashed: uncommitted data is lost."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(30)

    def close(self) -> None:
        self._stack.close()


@contextmanager
def restartable_postgres(**options: str) -> Iterator[RestartablePostgres]:
    """Yield a new Postgres, with options in addition to those of all test servers. Raises Missing.

    It keeps what is committed when it is cut down, which it would not with `synchronous_commit=off`.
    """
    user = ORDINARY_USER if os.getuid() == 0 else None  # Postgres refuses to run as root
    with private_folder(user, in_memory=True) as folder:
        binaries = binaries_for(user, _binaries(), folder)
        data = folder / "data"
        making: list[str | Path] = [binaries / "initdb", "-D", data, "-U", _USER, "-A", "trust", "-E", "UTF8"]
        making += ["--locale=C", "--no-sync"]
        subprocess.run(making, check=True, capture_output=True, user=user, cwd="/", timeout=120)
        words = [part for name, value in (_OPTIONS | options).items() for part in ("-c", f"{name}={value}")]
        server = RestartablePostgres([binaries / "postgres", "-D", data, "-k", folder, *words], folder, user)
        try:
            server.start()
            yield server
        finally:
            server.close()


@contextmanager
def postgres_database(server_url: str, template_url: str = "") -> Iterator[str]:
    """Yield the URL of a new database on a server of `postgres_server`, dropped at the end.

    It is empty, or a copy of another one there, to which no session may be connected.
    """
    folder = Path(server_url.split("?host=", 1)[1])
    name = f"test_{secrets.token_hex(6)}"
    template = template_url.partition("?")[0].rpartition("/")[2] or "template1"
    with _connect(folder) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}".encode())
    try:
        yield _url(folder, name)
    finally:
        with _connect(folder) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def _binaries() -> Path:
    found = postgres_binaries()
    if found is None:
        raise Missing("no Postgres: install the pgserver wheel (make venv) or Debian's postgresql")
    return found


def _url(folder: Path, database: str) -> str:
    return f"postgresql+psycopg://{_USER}@/{database}?host={folder}"


def _connect(folder: Path) -> psycopg.Connection:
    return psycopg.connect(host=str(folder), user=_USER, dbname="postgres", autocommit=True)


def _answers(folder: Path) -> bool:
    try:
        with _connect(folder) as connection:
            return connection.execute("SELECT 1").fetchone() == (1,)
    except psycopg.OperationalError:
        return False
