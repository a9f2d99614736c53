"""What the dispatcher reads and writes: which rollouts wait for a node, how full the nodes are, what to ring again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, func, literal, select, update

from farm.rollout import Stage, State
from farm.store.clock import db_now
from farm.store.rollouts import batches, rollouts

_live = rollouts.c.finish_seq.is_(None)
"""What has not ended; as the index of live rollouts words it."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A batch with rollouts that no node has yet; `n_placed` others of it are under way."""

    batch_id: str
    priority: int
    n_waiting: int
    n_placed: int = 0


@dataclass(frozen=True, slots=True)
class Bell:
    """A rollout's stage that a node's workers should look at."""

    rollout_id: str
    attempt: int
    stage: Stage
    node: str


@dataclass(frozen=True, slots=True)
class Coming:
    """`n` samples of an instance whose sandboxes are to be started."""

    batch_id: str
    group_index: int
    n: int


_waits = (_live, rollouts.c.state == State.QUEUED.value, rollouts.c.node.is_(None), rollouts.c.ready_at <= db_now())


def waiting(connection: Connection) -> list[Waiting]:
    """The batches that wait for room, oldest first."""
    open_batches = connection.execute(
        select(rollouts.c.batch_id, func.count(literal(1)), batches.c.priority)
        .join(batches, batches.c.batch_id == rollouts.c.batch_id)
        .where(*_waits)
        .group_by(rollouts.c.batch_id, batches.c.priority, batches.c.created_at)
        .order_by(batches.c.created_at)
    ).all()
    if not open_batches:
        return []
    placed: dict[str, int] = dict(
        connection.execute(
            select(rollouts.c.batch_id, func.count(literal(1)))
            .where(_live, rollouts.c.node.is_not(None))
            .group_by(rollouts.c.batch_id)
        )
        .tuples()
        .all()
    )
    return [Waiting(batch_id, priority, n, placed.get(batch_id, 0)) for batch_id, n, priority in open_batches]


def occupied(connection: Connection) -> dict[str, int]:
    """Node → rollouts placed on it that have not ended."""
    statement = (
        select(rollouts.c.node, func.count(literal(1)))
        .where(_live, rollouts.c.node.is_not(None))
        .group_by(rollouts.c.node)
    )
    return {str(node): n for node, n in connection.execute(statement)}


def next_of(connection: Connection, batch_id: str, limit: int) -> list[tuple[str, int, Stage]]:
    """The next rollouts of a batch to place, whole groups first: (id, attempt, stage)."""
    statement = (
        select(rollouts.c.rollout_id, rollouts.c.attempt, rollouts.c.stage)
        .where(rollouts.c.batch_id == batch_id, *_waits)
        .order_by(rollouts.c.group_index, rollouts.c.sample_index)
        .limit(limit)
    )
    return [(row.rollout_id, row.attempt, Stage(row.stage)) for row in connection.execute(statement)]


def next_groups_of(connection: Connection, batch_id: str, limit: int) -> list[Coming]:
    """What `next_of` would give, as far as it needs a sandbox to be played in."""
    nearest = (
        select(rollouts.c.group_index)
        .where(rollouts.c.batch_id == batch_id, rollouts.c.stage == Stage.INIT.value, *_waits)
        .order_by(rollouts.c.group_index, rollouts.c.sample_index)
        .limit(limit)
        .subquery()
    )
    statement = (
        select(nearest.c.group_index, func.count(literal(1))).group_by(nearest.c.group_index).order_by("group_index")
    )
    return [Coming(batch_id, group_index, n) for group_index, n in connection.execute(statement).tuples()]


def rung(connection: Connection, node: str) -> list[Coming]:
    """What a node has been given and has not begun, the first to come first."""
    statement = (
        select(rollouts.c.batch_id, rollouts.c.group_index, func.count(literal(1)))
        .where(
            _live,
            rollouts.c.node == node,
            rollouts.c.stage == Stage.INIT.value,
            rollouts.c.state == State.QUEUED.value,
        )
        .group_by(rollouts.c.batch_id, rollouts.c.group_index)
        .order_by(func.min(rollouts.c.queued_at), rollouts.c.group_index)
    )
    return [Coming(batch_id, group_index, n) for batch_id, group_index, n in connection.execute(statement).tuples()]


def place(connection: Connection, bells: Sequence[Bell], ring_again_s: float) -> None:
    """Give rollouts to nodes. One that was cancelled meanwhile is left alone."""
    statement = (
        update(rollouts)
        .where(
            rollouts.c.rollout_id == bindparam("b_id"),
            rollouts.c.attempt == bindparam("b_attempt"),
            rollouts.c.state == State.QUEUED.value,
            rollouts.c.node.is_(None),
        )
        .values(node=bindparam("b_node"), ring_at=db_now() + ring_again_s, n_rings=1)
    )
    connection.execute(
        statement, [{"b_id": bell.rollout_id, "b_attempt": bell.attempt, "b_node": bell.node} for bell in bells]
    )


def any_unheard(connection: Connection) -> bool:
    """Whether `unheard` would find something; a read, so that an idle farm writes nothing."""
    late = (_live, rollouts.c.state == State.QUEUED.value, rollouts.c.node.is_not(None), rollouts.c.ring_at < db_now())
    return connection.execute(select(rollouts.c.rollout_id).where(*late).limit(1)).first() is not None


def unheard(connection: Connection, ring_again_s: float, limit: int) -> list[Bell]:
    """Stages still queued on their node although they were rung; each waits twice as long for the next ring."""
    rows = connection.execute(
        select(
            rollouts.c.rollout_id,
            rollouts.c.attempt,
            rollouts.c.stage,
            rollouts.c.node,
            rollouts.c.n_rings,
        )
        .where(
            _live, rollouts.c.state == State.QUEUED.value, rollouts.c.node.is_not(None), rollouts.c.ring_at < db_now()
        )
        .limit(limit)
    ).all()
    if rows:
        connection.execute(
            update(rollouts)
            .where(rollouts.c.rollout_id == bindparam("b_id"))
            .values(ring_at=db_now() + bindparam("b_pause"), n_rings=rollouts.c.n_rings + 1),
            [{"b_id": row.rollout_id, "b_pause": min(60.0, ring_again_s * 2 ** min(row.n_rings, 10))} for row in rows],
        )
    return [Bell(row.rollout_id, row.attempt, Stage(row.stage), str(row.node)) for row in rows]


def abandon(connection: Connection, dead: Collection[str]) -> int:
    """Take what is queued on dead nodes off them. A sandbox there is gone, so these start over. Returns how many."""
    statement = (
        update(rollouts)
        .where(_live, rollouts.c.state == State.QUEUED.value, rollouts.c.node.in_(sorted(dead)))
        .values(node=None, attempt=rollouts.c.attempt + 1, queued_at=db_now(), ready_at=db_now())
    )
    back = statement.where(rollouts.c.stage != Stage.EVAL.value).values(stage=Stage.INIT.value)
    n = connection.execute(back).rowcount
    return n + connection.execute(statement.where(rollouts.c.stage == Stage.EVAL.value)).rowcount


def live_sandboxes(connection: Connection, node: str) -> set[tuple[str, int]]:
    """(rollout id, attempt) of everything placed on a node that has not ended: whose sandboxes must be left alone."""
    statement = select(rollouts.c.rollout_id, rollouts.c.attempt).where(rollouts.c.node == node, _live)
    return {(row.rollout_id, row.attempt) for row in connection.execute(statement)}
