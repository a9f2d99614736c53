"""The nodes of the farm, and which process leads: heartbeats, room, drain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import Connection, Table, delete, insert, select, update

from farm.store.clock import db_now
from farm.store.tables import LeaderRow, NodeRow

nodes = cast(Table, NodeRow.__table__)
leaders = cast(Table, LeaderRow.__table__)

UP = "up"
DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Node:
    """A node as its supervisor announced it. `room` is how many rollouts it takes at a time."""

    node: str
    room: int
    init_slots: int
    run_slots: int
    eval_slots: int
    handlers: list[str]
    info: dict[str, Any]
    state: str = UP
    heartbeat_age_s: float = 0.0


def announce(connection: Connection, node: Node) -> None:
    """Add a node, or take the place of its earlier self."""
    connection.execute(delete(nodes).where(nodes.c.node == node.node))
    values = {
        "node": node.node,
        "state": node.state,
        "room": node.room,
        "init_slots": node.init_slots,
        "run_slots": node.run_slots,
        "eval_slots": node.eval_slots,
        "handlers": node.handlers,
        "info": node.info,
    }
    connection.execute(insert(nodes).values(started_at=db_now(), heartbeat_at=db_now(), **values))


def heartbeat(connection: Connection, node: str) -> bool:
    """Say that a node lives. False if it has been removed."""
    statement = update(nodes).where(nodes.c.node == node).values(heartbeat_at=db_now())
    return connection.execute(statement).rowcount == 1


def drain(connection: Connection, node: str) -> None:
    """Place nothing more on a node."""
    connection.execute(update(nodes).where(nodes.c.node == node).values(state=DRAINING))


def remove(connection: Connection, node: str) -> None:
    connection.execute(delete(nodes).where(nodes.c.node == node))


def listing(connection: Connection) -> list[Node]:
    """All nodes, with the age of their last heartbeat."""
    statement = select(nodes, (db_now() - nodes.c.heartbeat_at).label("age")).order_by(nodes.c.node)
    return [
        Node(
            row.node,
            row.room,
            row.init_slots,
            row.run_slots,
            row.eval_slots,
            row.handlers,
            row.info,
            row.state,
            max(0.0, row.age),
        )
        for row in connection.execute(statement)
    ]


def lead(connection: Connection, role: str, owner: str, lease_s: float) -> bool:
    """Become or stay the one who does `role`, for `lease_s` more. False if somebody else is."""
    taken = (
        update(leaders)
        .where(leaders.c.role == role, (leaders.c.owner == owner) | (leaders.c.expires_at < db_now()))
        .values(owner=owner, expires_at=db_now() + lease_s)
    )
    if connection.execute(taken).rowcount:
        return True
    if connection.execute(select(leaders.c.owner).where(leaders.c.role == role)).one_or_none() is not None:
        return False
    connection.execute(insert(leaders).values(role=role, owner=owner, expires_at=db_now() + lease_s))
    return True


def abdicate(connection: Connection, role: str, owner: str) -> None:
    """Let somebody else lead at once."""
    connection.execute(delete(leaders).where(leaders.c.role == role, leaders.c.owner == owner))
