"""A private PgBouncer in transaction mode before a Postgres of the tests: few sessions, which all clients share."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg

from testkit.private_server import ORDINARY_USER, Missing, private_folder, running

N_SESSIONS = 3
"""Per database: further clients wait."""
_PORT = 6432
_USER = "farm"


@contextmanager
def pgbouncer(server_url: str) -> Iterator[Path]:
    """Start one before a server of `postgres_server`; yield the folder of its socket. Raises Missing."""
    program = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        raise Missing("no PgBouncer: apt-get install pgbouncer")
    user = ORDINARY_USER if os.getuid() == 0 else None  # it refuses to run as root
    with private_folder(user) as folder:
        settings = folder / "pgbouncer.ini"
        settings.write_text(
            f"[databases]\n* = host={server_url.partition('?host=')[2]} user={_USER}\n[pgbouncer]\n"
            f"listen_addr =\nlisten_port = {_PORT}\nunix_socket_dir = {folder}\nauth_type = any\n"
            f"pool_mode = transaction\ndefault_pool_size = {N_SESSIONS}\nmax_client_conn = 400\n"
        )
        settings.chmod(0o644)
        with running([program, settings], lambda: _answers(folder), folder.parent / f"{folder.name}.log", user=user):
            try:
                yield folder
            finally:
                (folder.parent / f"{folder.name}.log").unlink()


def through(folder: Path, database_url: str, pooler: str = "pooler=transaction") -> str:
    """Return the URL of a database through the PgBouncer."""
    return f"{database_url.partition('?')[0]}?host={folder}&port={_PORT}&{pooler}"


def _answers(folder: Path) -> bool:
    try:
        with psycopg.connect(host=str(folder), port=_PORT, user=_USER, dbname="postgres", autocommit=True) as line:
            return line.execute("SELECT 1").fetchone() == (1,)
    except psycopg.OperationalError:
        return False
