"""The nodes of the farm, and which process leads: heartbeats, room, drain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import Connection, Table, delete, func, insert, literal, select, update
from sqlalchemy.exc import IntegrityError

from farm.store.clock import db_now
from farm.store.tables import LeaderRow, NodeRow

nodes = cast(Table, NodeRow.__table__)
leaders = cast(Table, LeaderRow.__table__)

UP = "up"
DRAINING = "draining"

_SICK_S = (30.0, 600.0)
"""How long a node is out whose work fails; doubles each time in a row."""
_DOUBLINGS = 16
PROBES = 2
"""Rollouts a node is given at a time after that, until one of them goes well."""
BROKEN = "broken"
"""A pool of the node ends as soon as it is started; its `info` says which."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node as its supervisor announced it. `room` is how many rollouts it takes at a time.

    `sick_s` is for how much longer nothing is placed on it, because what it played failed, as `sick_why` says;
    `n_trips` counts how often that was so since something went well there.
    """

    node: str
    room: int
    init_slots: int
    run_slots: int
    eval_slots: int
    handlers: list[str]
    info: dict[str, Any]
    state: str = UP
    heartbeat_age_s: float = 0.0
    sick_s: float = 0.0
    sick_why: str = ""
    n_trips: int = 0

    @property
    def takes(self) -> int:
        """How many rollouts to place on it, those it has included."""
        if self.sick_s > 0:
            return 0
        return min(self.room, PROBES) if self.n_trips else self.room


def announce(connection: Connection, node: Node) -> None:
    """Add a node, or take the place of its earlier self.

    Starting anew mends little that makes a node sick, so it stays what it was until something goes well there.
    """
    sick = connection.execute(
        select(nodes.c.sick_until, nodes.c.sick_why, nodes.c.n_trips).where(nodes.c.node == node.node)
    ).one_or_none()
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
        **({} if sick is None else sick._asdict()),
    }
    connection.execute(insert(nodes).values(started_at=db_now(), heartbeat_at=db_now(), **values))


def heartbeat(connection: Connection, node: str) -> bool:
    """Say that a node lives. False if it has been removed."""
    statement = update(nodes).where(nodes.c.node == node).values(heartbeat_at=db_now())
    return connection.execute(statement).rowcount == 1


def drain(connection: Connection, node: str) -> None:
    """Place nothing more on a node."""
    connection.execute(update(nodes).where(nodes.c.node == node).values(state=DRAINING))


def change(connection: Connection, node: Node) -> None:
    """Give a node another state and info."""
    connection.execute(update(nodes).where(nodes.c.node == node.node).values(state=node.state, info=node.info))


def remove(connection: Connection, node: str) -> None:
    connection.execute(delete(nodes).where(nodes.c.node == node))


def listing(connection: Connection) -> list[Node]:
    """All nodes, with the age of their last heartbeat."""
    age, left = db_now() - nodes.c.heartbeat_at, nodes.c.sick_until - db_now()
    statement = select(nodes, age.label("age"), left.label("sick_s")).order_by(nodes.c.node)
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
            max(0.0, row.sick_s or 0.0),
            row.sick_why,
            row.n_trips,
        )
        for row in connection.execute(statement)
    ]


def _well(node_timeout_s: float) -> tuple[Any, ...]:
    """Of a node that is up, and not out for what failed there."""
    lives = nodes.c.heartbeat_at > db_now() - node_timeout_s
    return nodes.c.state == UP, lives, nodes.c.sick_until.is_(None) | (nodes.c.sick_until <= db_now())


def n_well(connection: Connection, node_timeout_s: float) -> int:
    """How many nodes are up and well."""
    return connection.execute(select(func.count(literal(1))).where(*_well(node_timeout_s))).scalar_one()


def trip(connection: Connection, node: str, why: str, node_timeout_s: float) -> float | None:
    """Take a node out because what it plays fails: for how many seconds, 0 if it is out for another reason or ending.

    None if it is the last that is not, which goes on: a farm without nodes mends nothing.
    """
    # two that go out at the same moment must see each other
    connection.execute(select(nodes.c.node).order_by(nodes.c.node).with_for_update()).all()
    others = select(func.count(literal(1))).where(*_well(node_timeout_s), nodes.c.node != node)
    n_trips = connection.execute(
        select(nodes.c.n_trips).where(nodes.c.node == node, *_well(node_timeout_s))
    ).scalar_one_or_none()
    if n_trips is None:
        # maybe this very write took it out, and was not answered
        left = select(nodes.c.sick_until - db_now()).where(nodes.c.node == node, nodes.c.sick_why == why)
        return max(0.0, connection.execute(left).scalar_one_or_none() or 0.0)
    if not connection.execute(others).scalar_one():
        return None
    pause_s: float = min(_SICK_S[0] * 2 ** min(n_trips, _DOUBLINGS), _SICK_S[1])
    sick = {"sick_until": db_now() + pause_s, "sick_why": why, "n_trips": n_trips + 1}
    connection.execute(update(nodes).where(nodes.c.node == node).values(**sick))
    return pause_s


def doubted(connection: Connection, node: str) -> str:
    """Why a node is out, or was until now; empty if something has gone well there since."""
    statement = select(nodes.c.sick_why).where(nodes.c.node == node, nodes.c.n_trips > 0)
    return connection.execute(statement).scalar_one_or_none() or ""


def clear(connection: Connection, node: str, why: str) -> bool:
    """Something went well on a node that had been out for this reason: nothing speaks against it any longer.

    False if it is still out, or for another.
    """
    statement = (
        update(nodes)
        .where(nodes.c.node == node, nodes.c.sick_why == why, nodes.c.sick_until <= db_now())
        .values(sick_until=None, sick_why="", n_trips=0)
    )
    if connection.execute(statement).rowcount == 1:
        return True
    well = select(nodes.c.node).where(nodes.c.node == node, nodes.c.n_trips == 0)
    return connection.execute(well).first() is not None


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
    try:
        with connection.begin_nested():
            connection.execute(insert(leaders).values(role=role, owner=owner, expires_at=db_now() + lease_s))
    except IntegrityError:  # another began to lead at the same moment
        return False
    return True


def abdicate(connection: Connection, role: str, owner: str) -> None:
    """Let somebody else lead at once."""
    connection.execute(delete(leaders).where(leaders.c.role == role, leaders.c.owner == owner))
