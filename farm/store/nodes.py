"""The nodes of the farm: heartbeats, capacity, drain, circuit breaker."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    and_,
    case,
    delete,
    func,
    insert,
    literal,
    select,
    text,
    update,
)

from farm.errors import Conflict
from farm.records.node import DRAINING, UP, Node
from farm.store.sql.clock import age_of, db_now, due, left_until
from farm.store.sql.database_sessions import POOLED
from farm.store.sql.schema import NodeRow

nodes = NodeRow.__table__
_ANNOUNCED = ("node", "room", "init_slots", "run_slots", "eval_slots", "handlers", "info", "state", "instance")
"""The fields of a node that its supervisor sets, in columns of the same names."""

MAX_OUT_OF_SERVICE_S = 600.0
_OUT_OF_SERVICE_S = (30.0, MAX_OUT_OF_SERVICE_S)
"""Seconds, first and most, that a node is out of service after failures; doubled each time in a row."""
_DOUBLINGS = 16

PROCESS_CONNECTIONS = 1
"""Per process of a node: all its reads, writes and renewals take turns on it (`ConnectionSlots`)."""
N_PROCESSES = 4
"""Per node: a supervisor, and a worker for each stage."""
NODE_CONNECTIONS = N_PROCESSES * PROCESS_CONNECTIONS
_CLIENTS = 15
"""Connections for a client, an API and tools."""


def announce(connection: Connection, node: Node) -> None:
    """Add a node, or replace its earlier row. Raises Conflict if another supervisor has the name (`node_names`).

    A restart rarely fixes the cause of failures, so the circuit breaker keeps its state until a rollout succeeds there.
    """
    out_of_service = connection.execute(
        select(nodes.c.out_of_service_until, nodes.c.out_of_service_why, nodes.c.n_trips).where(
            nodes.c.node == node.node
        )
    ).one_or_none()
    connection.execute(delete(nodes).where(_is_of(node)))
    if connection.execute(select(nodes.c.node).where(nodes.c.node == node.node)).first() is not None:
        raise name_is_taken(node.node)
    values = {name: getattr(node, name) for name in _ANNOUNCED}
    values |= {} if out_of_service is None else out_of_service._asdict()
    connection.execute(insert(nodes).values(started_at=db_now(), heartbeat_at=db_now(), **values))


def _is_of(node: Node) -> ColumnElement[bool]:
    """Return the condition that a row belongs to this supervisor."""
    return and_(nodes.c.node == node.node, nodes.c.instance == node.instance)


def name_is_taken(name: str) -> Conflict:
    """Return the error for a second node of the same name."""
    return Conflict(f"another node is called {name} and lives: set FARM_NODE to a name of its own for this one")


def heartbeat(connection: Connection, node: Node) -> str:
    """Record a node's heartbeat with its announcement. Returns the node's state; "" if it has been removed.

    The state is `draining` if that was ordered (`drain`), whatever the node announces. A heartbeat waits for no lock:
    if another transaction holds the row, it is skipped. Raises Conflict if another supervisor has the name now.
    """
    own = select(nodes.c.node).where(_is_of(node)).with_for_update(skip_locked=True, key_share=True)
    state = case((nodes.c.state == DRAINING, DRAINING), else_=node.state)
    statement = update(nodes).where(nodes.c.node.in_(own)).values(heartbeat_at=db_now(), state=state, info=node.info)
    if (now := connection.execute(statement.returning(nodes.c.state)).scalar()) is not None:
        return str(now)
    instance = connection.execute(select(nodes.c.instance).where(nodes.c.node == node.node)).scalar_one_or_none()
    if instance not in (None, node.instance):
        raise name_is_taken(node.node)
    return "" if instance is None else node.state


def drain(connection: Connection, node: str) -> bool:
    """Order a node to drain: it gets no more rollouts, and exits when done. False if there is no such node."""
    ordered = update(nodes).where(nodes.c.node == node).values(state=DRAINING)
    return connection.execute(ordered).rowcount > 0


def change(connection: Connection, node: Node) -> None:
    """Set state and info of a node, unless it is draining."""
    changed = update(nodes).where(nodes.c.node == node.node, nodes.c.state != DRAINING)
    connection.execute(changed.values(state=node.state, info=node.info))


def remove(connection: Connection, node: str) -> None:
    connection.execute(delete(nodes).where(nodes.c.node == node))


def listing(connection: Connection) -> list[Node]:
    """Return all nodes, with the age of their last heartbeat."""
    return [
        Node(
            **{name: getattr(row, name) for name in (*_ANNOUNCED, "out_of_service_why", "n_trips")},
            heartbeat_age_s=max(0.0, row.age),
            out_of_service_s=max(0.0, row.out_of_service_s or 0.0),
            up_s=max(0.0, row.up_s),
        )
        for row in connection.execute(_listing())
    ]


@cache
def _listing() -> Select[Any]:
    age, left = age_of(nodes.c.heartbeat_at), left_until(nodes.c.out_of_service_until, MAX_OUT_OF_SERVICE_S)
    up = age_of(nodes.c.started_at).label("up_s")
    return select(nodes, age.label("age"), left.label("out_of_service_s"), up).order_by(nodes.c.node)


def _healthy(node_timeout_s: float) -> tuple[Any, ...]:
    lives = age_of(nodes.c.heartbeat_at) < node_timeout_s
    return (
        nodes.c.state == UP,
        lives,
        nodes.c.out_of_service_until.is_(None) | due(nodes.c.out_of_service_until, MAX_OUT_OF_SERVICE_S),
    )


def n_healthy(connection: Connection, node_timeout_s: float) -> int:
    """Return the number of healthy nodes."""
    return connection.execute(select(func.count(literal(1))).where(*_healthy(node_timeout_s))).scalar_one()


def open_breaker(connection: Connection, node: str, why: str, node_timeout_s: float) -> float | None:
    """Take a node out of service after failures. Returns for how many seconds; 0 if it was already out, or is ending.

    None if it is the last healthy node, which stays in service: a farm without nodes makes no progress.
    """
    # locked, so that two nodes that fail at the same moment see each other
    connection.execute(select(nodes.c.node).order_by(nodes.c.node).with_for_update(key_share=True)).all()
    others = select(func.count(literal(1))).where(*_healthy(node_timeout_s), nodes.c.node != node)
    n_trips = connection.execute(
        select(nodes.c.n_trips).where(nodes.c.node == node, *_healthy(node_timeout_s))
    ).scalar_one_or_none()
    if n_trips is None:
        # maybe this write took it out before, and only the answer was lost
        left = select(left_until(nodes.c.out_of_service_until, MAX_OUT_OF_SERVICE_S)).where(
            nodes.c.node == node, nodes.c.out_of_service_why == why
        )
        return max(0.0, connection.execute(left).scalar_one_or_none() or 0.0)
    if not connection.execute(others).scalar_one():
        return None
    pause_s: float = min(_OUT_OF_SERVICE_S[0] * 2 ** min(n_trips, _DOUBLINGS), MAX_OUT_OF_SERVICE_S)
    out_of_service = {"out_of_service_until": db_now() + pause_s, "out_of_service_why": why, "n_trips": n_trips + 1}
    connection.execute(update(nodes).where(nodes.c.node == node).values(**out_of_service))
    return pause_s


def breaker_reason(connection: Connection, node: str) -> str:
    """Return the reason a node is or was out of service; empty if a rollout has succeeded there since."""
    statement = select(nodes.c.out_of_service_why).where(nodes.c.node == node, nodes.c.n_trips > 0)
    return connection.execute(statement).scalar_one_or_none() or ""


def close_breaker(connection: Connection, node: str, why: str) -> bool:
    """Close the circuit breaker of a node that was out for this reason: a rollout has succeeded there.

    False if it is still out, or out for another reason.
    """
    statement = (
        update(nodes)
        .where(
            nodes.c.node == node,
            nodes.c.out_of_service_why == why,
            due(nodes.c.out_of_service_until, MAX_OUT_OF_SERVICE_S),
        )
        .values(out_of_service_until=None, out_of_service_why="", n_trips=0)
    )
    if connection.execute(statement).rowcount == 1:
        return True
    well = select(nodes.c.node).where(nodes.c.node == node, nodes.c.n_trips == 0)
    return connection.execute(well).first() is not None


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
