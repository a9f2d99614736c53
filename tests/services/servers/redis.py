"""A private Redis on a Unix socket without persistence."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import redis

from farm.embedded.own_redis import redis_server as find_redis_server
from farm.errors import BrokerUnavailable
from testkit.private_server import Missing, private_folder, running
from tests.services.servers.broker import Broker

_SCHEME = "redis+socket://"  # Celery's name for a Unix socket


@contextmanager
def redis_server() -> Iterator[str]:
    """Yield the broker URL of a new Redis (`redis+socket://`). Raises Missing."""
    with redis_broker() as broker:
        yield broker.url


@contextmanager
def redis_broker() -> Iterator[Broker]:
    """Yield a new Redis that is ready; it loses all data when it is killed. Raises Missing."""
    try:
        binary = find_redis_server()
    except BrokerUnavailable as error:
        raise Missing(str(error)) from error
    with private_folder() as folder:
        socket = folder / "redis.sock"
        url = f"{_SCHEME}{socket}"
        command: list[str | Path] = [binary, "--port", "0", "--unixsocket", socket, "--dir", folder]
        command += ["--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"]

        def cut() -> None:
            with redis_client(url) as client:
                for kind in ("pubsub", "normal"):
                    client.client_kill_filter(_type=kind, skipme=True)

        def full(full: bool) -> None:
            with redis_client(url) as client:
                client.config_set("maxmemory", "1kb" if full else "0")

        def live() -> AbstractContextManager[subprocess.Popen[bytes]]:
            return running(command, lambda: _answers(socket), folder / "redis.log")

        with Broker(url, socket, "redis://127.0.0.1:{port}/0", live, cut, full) as broker:
            yield broker


def redis_client(url: str) -> redis.Redis:
    """Return a client for a URL of `redis_server`."""
    return redis.Redis(unix_socket_path=url.removeprefix(_SCHEME))


def _answers(socket: Path) -> bool:
    try:
        with redis.Redis(unix_socket_path=str(socket)) as client:
            return bool(client.ping())
    except redis.RedisError:
        return False
