"""The database and the broker of a run: private servers that can be killed, frozen and restarted with their data."""

from __future__ import annotations

from contextlib import ExitStack

import psycopg

from testkit.postgres import restartable_postgres
from tests.services.servers.rabbitmq import rabbitmq_broker
from tests.services.servers.redis import redis_broker

_OPTIONS = {"shared_buffers": "64MB", "max_connections": "400"}


class Postgres:
    """A private Postgres. Raises Missing if there is none to run."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._server = self._stack.enter_context(restartable_postgres(**_OPTIONS))
        self.url = self._server.url
        self.running = True

    def start(self) -> None:
        """Start it with its data."""
        self._server.start()
        self.running = True

    def crash(self) -> None:
        """Shut it down immediately: every session is cut, nothing is written, the next start recovers from the log."""
        self.running = False
        self._server.cut_down()

    def cut_sessions(self) -> int:
        """End every session; return how many there were."""
        plain = self.url.replace("+psycopg", "")
        result = (
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
            " WHERE pid != pg_backend_pid() AND backend_type = 'client backend'"
        )
        with psycopg.connect(plain, autocommit=True) as connection:
            row = connection.execute(result).fetchone()
        assert row
        return int(row[0])

    def stop(self) -> None:
        self._stack.close()


class BrokerUnderTest:
    """A private Redis or RabbitMQ; `url` stays across restarts. Raises Missing if there is none to run."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._stack = ExitStack()
        self._broker = self._stack.enter_context(redis_broker() if kind == "redis" else rabbitmq_broker())
        self.url = self._broker.url
        self.running = True
        self.frozen = False
        self.full = False

    def kill(self) -> None:
        """Kill it by -9. A Redis loses all its data."""
        self._broker.kill()
        self.running = self.frozen = self.full = False

    def start(self) -> None:
        self._broker.start()
        self.running = True

    def freeze(self) -> None:
        self._broker.freeze()
        self.frozen = True

    def thaw(self) -> None:
        self._broker.thaw()
        self.frozen = False

    def fill(self, full: bool) -> None:
        """Put the broker out of memory, or undo that."""
        self._broker.full(full)
        self.full = full

    def cut(self) -> None:
        """Close every connection."""
        self._broker.cut()

    def stop(self) -> None:
        if self.frozen:
            self.thaw()
        self._stack.close()
