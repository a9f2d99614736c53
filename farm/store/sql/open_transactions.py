"""Long open transactions in Postgres, whose locks other sessions may wait for."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, text

# the farm's own transactions take milliseconds
_OPEN = text(
    "SELECT pid, application_name, client_addr, state, extract(epoch FROM clock_timestamp() - xact_start) AS age_s "
    "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() "
    "AND xact_start < clock_timestamp() - interval '2 s' ORDER BY xact_start"
)


@dataclass(frozen=True, slots=True)
class OpenTransaction:
    """A session of the database whose transaction has been open for `age_s`."""

    pid: int
    where: str
    state: str
    age_s: float

    @property
    def is_silent(self) -> bool:
        """True if its client has sent no statement since the last one ended."""
        return self.state.startswith("idle in transaction")

    def __str__(self) -> str:
        return f"session {self.pid} of {self.where}, {self.state} for {self.age_s:.0f} s"


def open_transactions(connection: Connection) -> list[OpenTransaction]:
    """Return the transactions of other sessions that are open for seconds, the oldest first; none for SQLite."""
    if connection.dialect.name != "postgresql":
        return []
    return [
        OpenTransaction(
            row.pid,
            f"{row.application_name or 'a program'} at {row.client_addr or 'this machine'}",
            row.state or "",
            float(row.age_s),
        )
        for row in connection.execute(_OPEN)
    ]


def silent_transactions(connection: Connection) -> list[OpenTransaction]:
    """Return only those with a silent session."""
    return [each for each in open_transactions(connection) if each.is_silent]
