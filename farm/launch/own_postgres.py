"""The farm's own Postgres: its binaries, its data folder, and the server as a child process."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from farm.embedded.child_process import ChildProcess
from farm.embedded.farm_processes import last_lines
from farm.embedded.node_folder import own_folder
from farm.errors import NotAllowed, StoreUnavailable
from farm.home import write_own
from farm.launch.shared_address import bracketed

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

    def forget_other_machine(self) -> None:
        """Remove the lock file left by the server of a gone machine; only for the holder of the claim."""
        (self.data / "postmaster.pid").unlink(missing_ok=True)

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
        """Start a program of Postgres as the server's user."""
        if self._user is not None:
            # a change of user clears the parent-death signal, so it is set again
            as_user = [f"--reuid={self._user}", f"--regid={_group(self._user)}", "--clear-groups"]
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


def _group(user: str) -> int:
    return pwd.getpwnam(user).pw_gid
