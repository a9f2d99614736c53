"""What the dispatcher reads and writes: which rollouts wait for a node, how full the nodes are, what to ring again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Select, bindparam, case, func, literal, select, update

from farm.rollout import Stage, State
from farm.store.clock import db_now
from farm.store.nodes import nodes
from farm.store.rollouts import CHUNK, attempts, batches, released, rollouts
from farm.verdict import DRAINED

_live = rollouts.c.finish_seq.is_(None)
"""What has not ended; as the index of live rollouts words it."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A batch with rollouts that no node has yet, as many as were counted; `n_placed` others of it are under way."""

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
# `node` is null in all of what is sorted by these; with it they are the order of the index of live rollouts, of which
# Postgres then reads no more than it is asked for
_in_order = (rollouts.c.node, rollouts.c.group_index, rollouts.c.sample_index)


def _statement_of_waiting() -> Select[str, int, int]:
    """Steps from batch to batch through the index, and counts in each no further than `b_limit`."""
    unplaced = (
        select(rollouts.c.batch_id)
        .where(_live, rollouts.c.node.is_(None))
        .order_by(rollouts.c.node, rollouts.c.batch_id)
        .limit(1)
    )
    found = select(unplaced.scalar_subquery().label("batch_id")).cte("found", recursive=True)
    following = unplaced.where(rollouts.c.batch_id > found.c.batch_id).correlate(found).scalar_subquery()
    found = found.union_all(select(following).where(found.c.batch_id.is_not(None)))
    some = (
        select(literal(1))
        .where(rollouts.c.batch_id == found.c.batch_id, *_waits)
        .limit(bindparam("b_limit"))
        .correlate(found)
        .subquery()
    )
    n_waiting = select(func.count(literal(1))).select_from(some).correlate(found).scalar_subquery()
    return (
        select(batches.c.batch_id, batches.c.priority, n_waiting)
        .join(found, batches.c.batch_id == found.c.batch_id)
        .order_by(batches.c.created_at)
    )


_waiting = _statement_of_waiting()


def waiting(connection: Connection, limit: int) -> list[Waiting]:
    """The batches that wait for room, oldest first; of each, `limit` rollouts at most are counted.

    So what it costs follows from how many batches are open and how much room there is, not from how much waits.
    """
    open_batches = [row for row in connection.execute(_waiting, {"b_limit": limit}).tuples() if row[2]]
    if not open_batches:
        return []
    # by node first, as the index of live rollouts is sorted
    by_node = (
        select(rollouts.c.node, rollouts.c.batch_id, func.count(literal(1)))
        .where(_live, rollouts.c.node.is_not(None))
        .group_by(rollouts.c.node, rollouts.c.batch_id)
    )
    placed = Counter[str]()
    for _, batch_id, n in connection.execute(by_node).tuples():
        placed[batch_id] += n
    return [Waiting(batch_id, priority, n, placed[batch_id]) for batch_id, priority, n in open_batches]


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
        .order_by(*_in_order)
        .limit(limit)
    )
    return [(row.rollout_id, row.attempt, Stage(row.stage)) for row in connection.execute(statement)]


def next_groups_of(connection: Connection, batch_id: str, limit: int) -> list[Coming]:
    """What `next_of` would give, as far as it needs a sandbox to be played in."""
    nearest = (
        select(rollouts.c.group_index)
        .where(rollouts.c.batch_id == batch_id, rollouts.c.stage == Stage.INIT.value, *_waits)
        .order_by(*_in_order)
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


_unhold = (
    update(rollouts)
    .where(
        rollouts.c.rollout_id == bindparam("b_id"),
        rollouts.c.attempt == bindparam("b_attempt"),
        rollouts.c.stage == bindparam("b_stage"),
        rollouts.c.state == State.ACTIVE.value,
    )
    .values(state=State.QUEUED.value, failure_kind=DRAINED, **released)
)
_end_drained = (
    update(attempts)
    .where(
        attempts.c.rollout_id == bindparam("b_id"),
        attempts.c.attempt == bindparam("b_attempt"),
        attempts.c.stage == bindparam("b_stage"),
        attempts.c.finished_at.is_(None),
    )
    .values(finished_at=db_now(), result=DRAINED)
)


def any_unheard(connection: Connection) -> bool:
    """Whether `unheard` would find something; a read, so that an idle farm writes nothing."""
    return connection.execute(_late.limit(1)).first() is not None


def _statement_of_late() -> Select[str, int, str, str, int]:
    """What was rung and is still queued, the longest silent first: of each pool no more than it has idle slots.

    A pool all of whose slots are taken hears nothing, for hours maybe: its rings wait in the broker, and more of them
    would fill it.
    """
    queued = (_live, rollouts.c.state == State.QUEUED.value, rollouts.c.node.is_not(None))
    busy = (
        select(rollouts.c.node, rollouts.c.stage, func.count(literal(1)).label("n"))
        .where(_live, rollouts.c.state == State.ACTIVE.value, rollouts.c.node.is_not(None))
        .group_by(rollouts.c.node, rollouts.c.stage)
        .subquery()
    )
    number = func.row_number().over(partition_by=(rollouts.c.node, rollouts.c.stage), order_by=rollouts.c.ring_at)
    late = select(rollouts, number.label("number")).where(*queued, rollouts.c.ring_at < db_now()).subquery()
    slots = case(
        (late.c.stage == Stage.INIT.value, nodes.c.init_slots),
        (late.c.stage == Stage.RUN.value, nodes.c.run_slots),
        else_=nodes.c.eval_slots,
    )
    return (
        select(late.c.rollout_id, late.c.attempt, late.c.stage, late.c.node, late.c.n_rings)
        .join(nodes, nodes.c.node == late.c.node)
        .outerjoin(busy, (busy.c.node == late.c.node) & (busy.c.stage == late.c.stage))
        .where(late.c.number <= slots - func.coalesce(busy.c.n, 0))
    )


_late = _statement_of_late()


def unheard(connection: Connection, ring_again_s: float, limit: int) -> list[Bell]:
    """Stages still queued on their node although they were rung; each waits twice as long for the next ring."""
    rows = connection.execute(_late.limit(limit)).all()
    if rows:
        connection.execute(
            update(rollouts)
            .where(rollouts.c.rollout_id == bindparam("b_id"))
            .values(ring_at=db_now() + bindparam("b_pause"), n_rings=rollouts.c.n_rings + 1),
            [{"b_id": row.rollout_id, "b_pause": min(60.0, ring_again_s * 2 ** min(row.n_rings, 10))} for row in rows],
        )
    return [Bell(row.rollout_id, row.attempt, Stage(row.stage), str(row.node)) for row in rows]


def rung_in_vain(connection: Connection, bells: Sequence[Bell], ring_again_s: float) -> None:
    """The broker that was to carry them is away, which says nothing about who should hear them: begin to count anew."""
    statement = (
        update(rollouts)
        .where(
            rollouts.c.rollout_id == bindparam("b_id"),
            rollouts.c.attempt == bindparam("b_attempt"),
            rollouts.c.state == State.QUEUED.value,
        )
        .values(ring_at=db_now() + ring_again_s, n_rings=1)
    )
    connection.execute(statement, [{"b_id": bell.rollout_id, "b_attempt": bell.attempt} for bell in bells])


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


def hand_back_unbegun(connection: Connection, node: str) -> int:
    """Take off a node what it has been given and has not begun; no attempt is over. Returns how many."""
    statement = (
        update(rollouts)
        .where(
            _live,
            rollouts.c.node == node,
            rollouts.c.stage == Stage.INIT.value,
            rollouts.c.state == State.QUEUED.value,
        )
        .values(node=None)
    )
    return connection.execute(statement).rowcount


def hand_back_all(connection: Connection, node: str) -> int:
    """Take everything off a node that plays nothing more, active or queued: none of it counts as an attempt that broke.

    Only for who knows that no worker of the node is left. Returns how many.
    """
    on_node = (_live, rollouts.c.node == node)
    active = connection.execute(
        select(rollouts.c.rollout_id, rollouts.c.attempt, rollouts.c.stage).where(
            *on_node, rollouts.c.state == State.ACTIVE.value
        )
    ).all()
    if active:
        held = [{"b_id": row.rollout_id, "b_attempt": row.attempt, "b_stage": row.stage} for row in active]
        why = f"node {node} was drained, and its worker did not hand it back in time"
        connection.execute(_unhold.values(failure_message=why), held)
        connection.execute(_end_drained.values(error=why), held)
    return abandon(connection, [node])


def start_anew(connection: Connection, node: str) -> int:
    """What a node's killed self had: its leases run out now, what was queued there starts over. Returns how many."""
    held = (_live, rollouts.c.node == node, rollouts.c.state == State.ACTIVE.value)
    lost = connection.execute(update(rollouts).where(*held).values(lease_expires_at=0.0)).rowcount
    return lost + abandon(connection, [node])


def live_sandboxes(connection: Connection, node: str) -> set[tuple[str, int]]:
    """(rollout id, attempt) of everything placed on a node that has not ended: whose sandboxes must be left alone."""
    statement = select(rollouts.c.rollout_id, rollouts.c.attempt).where(rollouts.c.node == node, _live)
    return {(row.rollout_id, row.attempt) for row in connection.execute(statement)}


def taken_away(connection: Connection, rollout_ids: Collection[str]) -> set[tuple[str, int]]:
    """(rollout id, attempt) of these rollouts' attempts whose sandboxes are to be ended at once.

    Those of what was cancelled, whoever plays it; and those of what was taken away after it was started, before anybody
    played it, as no worker holds these.
    """
    played = attempts.alias()
    nobody_played = ~(
        select(literal(1))
        .where(
            played.c.rollout_id == attempts.c.rollout_id,
            played.c.attempt == attempts.c.attempt,
            played.c.stage == Stage.RUN.value,
        )
        .exists()
    )
    waited = (attempts.c.stage == Stage.INIT.value) & (attempts.c.result == "advanced") & nobody_played
    away: set[tuple[str, int]] = set()
    ids = sorted(rollout_ids)
    for start in range(0, len(ids), CHUNK):
        statement = (
            select(attempts.c.rollout_id, attempts.c.attempt)
            .join(rollouts, rollouts.c.rollout_id == attempts.c.rollout_id)
            .where(
                attempts.c.rollout_id.in_(ids[start : start + CHUNK]),
                rollouts.c.attempt > attempts.c.attempt,
                (rollouts.c.state == State.CANCELLED.value) | waited,
            )
        )
        away.update((row.rollout_id, row.attempt) for row in connection.execute(statement))
    return away
