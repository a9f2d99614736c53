"""The Postgres connections that a farm needs, and those that the server allows."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, literal, select, text

from farm.store.nodes import nodes
from farm.store.sql.database_sessions import POOLED

PROCESS_CONNECTIONS = 1
"""Per process of a node: all its reads, writes and renewals take turns on it (`ConnectionSlots`)."""
N_PROCESSES = 4
"""Per node: a supervisor, and a worker for each stage."""
NODE_CONNECTIONS = N_PROCESSES * PROCESS_CONNECTIONS
_CLIENTS = 15
"""Connections for a client, an API and tools."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The connections that the server allows, and those that the present nodes and a client need."""

    n_nodes: int
    n_allowed: int

    @property
    def n_needed(self) -> int:
        return self.n_nodes * NODE_CONNECTIONS + _CLIENTS

    @property
    def suffices(self) -> bool:
        return self.n_needed <= self.n_allowed


def capacity(connection: Connection) -> Capacity | None:
    """Return the server's limit and the nodes' need; None for SQLite or behind a pooler, without such a limit."""
    n_nodes = connection.execute(select(func.count(literal(1))).select_from(nodes)).scalar_one()
    if connection.dialect.name != "postgresql" or connection.get_execution_options().get(POOLED):
        return None
    names = ("max_connections", "superuser_reserved_connections")
    most, reserved = (int(connection.execute(text(f"SHOW {name}")).scalar_one()) for name in names)
    return Capacity(n_nodes, most - reserved)
