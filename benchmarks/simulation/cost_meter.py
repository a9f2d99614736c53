"""The CPU time of operations on a store: of this process, and of the database's processes that serve it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, text

from farm.store.database import Store

T = TypeVar("T")
_REFRESHED_EVERY = 200
_SESSIONS = text("SELECT pid FROM pg_stat_activity WHERE datname = current_database()")


@dataclass(slots=True)
class Cost:
    """CPU seconds of all operations of one kind: their number, the client's seconds, the database's seconds."""

    n: int = 0
    client_s: float = 0.0
    database_s: float = 0.0

    @property
    def of_one_in_database_s(self) -> float:
        return self.database_s / self.n if self.n else 0.0


class CostMeter:
    """Runs operations one after the other and sums their cost by kind. Only for Postgres on this machine."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sessions: list[Path] = []
        self._until_refresh = 0
        self.costs: dict[str, Cost] = defaultdict(Cost)

    def measure(self, kind: str, operation: Callable[[], T]) -> tuple[T, float]:
        """Run an operation; return its result, and its CPU seconds on both sides."""
        if not self._until_refresh:
            self._until_refresh = _REFRESHED_EVERY
            self._sessions = [Path(f"/proc/{pid}/schedstat") for pid in self._store.read(_sessions)]
        self._until_refresh -= 1
        database_before = self._database_s()
        client_before = time.process_time()
        result = operation()
        client_s = time.process_time() - client_before
        database_s = self._database_s() - database_before
        cost = self.costs[kind]
        cost.n += 1
        cost.client_s += client_s
        cost.database_s += database_s
        return result, client_s + database_s

    def _database_s(self) -> float:
        nanoseconds = 0
        for path in self._sessions:
            try:
                nanoseconds += int(path.read_text().split()[0])
            except OSError:  # its connection was closed
                self._until_refresh = 0
        return nanoseconds / 1e9


def _sessions(connection: Connection) -> list[int]:
    return list(connection.execute(_SESSIONS).scalars())
