"""Queries of the dispatcher: rollouts that wait for a node, load of the nodes, messages to send again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, Select, bindparam, case, func, literal, select, update

from farm.records.engine_state import ACTIVE
from farm.records.rollout import Stage, State
from farm.retry_policy import DRAINED, MAX_PAUSE_S, WITHOUT_WEIGHTS
from farm.store import borrowed_sandboxes as borrowed
from farm.store.llm_engines import engines
from farm.store.locks import lock_rollouts
from farm.store.nodes import nodes
from farm.store.rollouts import LEASE_CLEARED, attempt_ends, attempts, batches, chunks, rollouts
from farm.store.sql.clock import db_now, due

_live = rollouts.c.finish_seq.is_(None)
"""The condition that a rollout has not ended, worded as the index of live rollouts."""


@dataclass(frozen=True, slots=True)
class WaitingBatch:
    """A batch with unplaced rollouts, counted up to a limit; `n_placed` others of it are on nodes."""

    batch_id: str
    priority: int
    n_waiting: int
    n_placed: int = 0


@dataclass(frozen=True, slots=True)
class StageMessage:
    """A message that names a rollout's stage to a node's workers."""

    rollout_id: str
    attempt: int
    stage: Stage
    node: str


@dataclass(frozen=True, slots=True)
class QueuedStage:
    """A stage of a rollout that has no node yet."""

    rollout_id: str
    attempt: int
    stage: Stage
    data_source: str


@dataclass(frozen=True, slots=True)
class UpcomingStart:
    """`n` samples of an instance whose sandboxes are to be started."""

    batch_id: str
    group_index: int
    n: int


_has_weights = (
    select(literal(1))
    .where(engines.c.state == ACTIVE, engines.c.failure == "", engines.c.version == engines.c.engine_version)
    .exists()
)
_may_be_placed = rollouts.c.failure_kind.is_(None) | (rollouts.c.failure_kind != WITHOUT_WEIGHTS) | _has_weights
"""The condition that a rollout may be placed: one requeued for lack of weights waits until an engine has them."""
_waits = (
    _live,
    rollouts.c.state == State.QUEUED.value,
    rollouts.c.node.is_(None),
    due(rollouts.c.ready_at, MAX_PAUSE_S),
    _may_be_placed,
)
# `node` is null in all rows sorted by these; including it makes this the order of the index of live rollouts, so that
# Postgres reads only `limit` rows
_in_order = (rollouts.c.node, rollouts.c.group_index, rollouts.c.sample_index)


def _statement_of_waiting() -> Select[str, int, int]:
    """Select waiting batches: step from batch to batch in the index, and count up to `b_limit` in each."""
    unplaced = (
        select(rollouts.c.batch_id)
        .where(_live, rollouts.c.node.is_(None))
        .order_by(rollouts.c.node, rollouts.c.batch_id)
        .limit(1)
    )
    candidates = select(unplaced.scalar_subquery().label("batch_id")).cte("candidates", recursive=True)
    following = unplaced.where(rollouts.c.batch_id > candidates.c.batch_id).correlate(candidates).scalar_subquery()
    candidates = candidates.union_all(select(following).where(candidates.c.batch_id.is_not(None)))
    some = (
        select(literal(1))
        .where(rollouts.c.batch_id == candidates.c.batch_id, *_waits)
        .limit(bindparam("b_limit"))
        .correlate(candidates)
        .subquery()
    )
    n_waiting = select(func.count(literal(1))).select_from(some).correlate(candidates).scalar_subquery()
    return (
        select(batches.c.batch_id, batches.c.priority, n_waiting)
        .join(candidates, batches.c.batch_id == candidates.c.batch_id)
        .order_by(batches.c.created_at)
    )


_waiting = _statement_of_waiting()


def waiting(connection: Connection, limit: int) -> list[WaitingBatch]:
    """Return the batches that wait for capacity, oldest first; at most `limit` rollouts of each are counted.

    So the cost depends on the number of open batches and on the capacity, not on the number of waiting rollouts.
    """
    open_batches = [row for row in connection.execute(_waiting, {"b_limit": limit}).tuples() if row[2]]
    if not open_batches:
        return []
    # by node first, the sort order of the index of live rollouts
    by_node = (
        select(rollouts.c.node, rollouts.c.batch_id, func.count(literal(1)))
        .where(_live, rollouts.c.node.is_not(None))
        .group_by(rollouts.c.node, rollouts.c.batch_id)
    )
    placed = Counter[str]()
    for _, batch_id, n in connection.execute(by_node).tuples():
        placed[batch_id] += n
    return [WaitingBatch(batch_id, priority, n, placed[batch_id]) for batch_id, priority, n in open_batches]


def occupied(connection: Connection) -> dict[str, int]:
    """Return node → number of live rollouts placed on it, and sandboxes borrowed there."""
    statement = (
        select(rollouts.c.node, func.count(literal(1)))
        .where(_live, rollouts.c.node.is_not(None))
        .group_by(rollouts.c.node)
    )
    return dict(Counter({str(node): n for node, n in connection.execute(statement)}) + borrowed.occupied(connection))


def next_of(connection: Connection, batch_id: str, limit: int) -> list[QueuedStage]:
    """Return the next rollouts of a batch to place, complete groups first."""
    statement = (
        select(rollouts.c.rollout_id, rollouts.c.attempt, rollouts.c.stage, rollouts.c.data_source)
        .where(rollouts.c.batch_id == batch_id, *_waits)
        .order_by(*_in_order)
        .limit(limit)
    )
    rows = connection.execute(statement)
    return [QueuedStage(row.rollout_id, row.attempt, Stage(row.stage), row.data_source) for row in rows]


def next_groups_of(connection: Connection, batch_id: str, limit: int) -> list[UpcomingStart]:
    """Return the groups of the rollouts that `next_of` returns which still need a sandbox."""
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
    return [UpcomingStart(batch_id, group_index, n) for group_index, n in connection.execute(statement).tuples()]


def assigned_starts(connection: Connection, node: str) -> list[UpcomingStart]:
    """Return the starts that are assigned to a node and have not begun, longest queued first."""
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
    return [UpcomingStart(*row) for row in connection.execute(statement)]


def _in_order_of_id(stage_messages: Sequence[StageMessage]) -> Sequence[StageMessage]:
    """Sort messages in the lock order of `locks`."""
    return sorted(stage_messages, key=lambda message: message.rollout_id)


def place(connection: Connection, stage_messages: Sequence[StageMessage], resend_after_s: float) -> None:
    """Assign rollouts to nodes; one that needs no sandbox starts at stage run. Cancelled ones are skipped."""
    statement = (
        update(rollouts)
        .where(
            rollouts.c.rollout_id == bindparam("b_id"),
            rollouts.c.attempt == bindparam("b_attempt"),
            (rollouts.c.stage == Stage.INIT.value) | (rollouts.c.stage == bindparam("b_stage")),
            rollouts.c.state == State.QUEUED.value,
            rollouts.c.node.is_(None),
        )
        .values(node=bindparam("b_node"), stage=bindparam("b_stage"), resend_at=db_now() + resend_after_s, n_sends=1)
    )
    connection.execute(
        statement,
        [
            {
                "b_id": message.rollout_id,
                "b_attempt": message.attempt,
                "b_node": message.node,
                "b_stage": message.stage.value,
            }
            for message in _in_order_of_id(stage_messages)
        ],
    )


_unhold = (
    update(rollouts)
    .where(
        rollouts.c.rollout_id == bindparam("b_id"),
        rollouts.c.attempt == bindparam("b_attempt"),
        rollouts.c.stage == bindparam("b_stage"),
        rollouts.c.state == State.ACTIVE.value,
    )
    .values(state=State.QUEUED.value, failure_kind=DRAINED, **LEASE_CLEARED)
)


def any_undelivered(connection: Connection) -> bool:
    """Return whether `undelivered` would find any; a read, so that an idle farm writes nothing."""
    return connection.execute(_late.limit(1)).first() is not None


def _statement_of_late() -> Select[str, int, str, str, int]:
    """Select stages that are still queued after their message was sent, oldest first, at most a pool's idle slots.

    A pool without idle slots may take no messages for hours: they wait in the broker, and more of them would fill it.
    """
    queued = (_live, rollouts.c.state == State.QUEUED.value, rollouts.c.node.is_not(None))
    busy = (
        select(rollouts.c.node, rollouts.c.stage, func.count(literal(1)).label("n"))
        .where(_live, rollouts.c.state == State.ACTIVE.value, rollouts.c.node.is_not(None))
        .group_by(rollouts.c.node, rollouts.c.stage)
        .subquery()
    )
    number = func.row_number().over(partition_by=(rollouts.c.node, rollouts.c.stage), order_by=rollouts.c.resend_at)
    unstarted = (
        select(rollouts, number.label("number")).where(*queued, due(rollouts.c.resend_at, MAX_PAUSE_S)).subquery()
    )
    slots = case(
        (unstarted.c.stage == Stage.INIT.value, nodes.c.init_slots),
        (unstarted.c.stage == Stage.RUN.value, nodes.c.run_slots),
        else_=nodes.c.eval_slots,
    )
    return (
        select(unstarted.c.rollout_id, unstarted.c.attempt, unstarted.c.stage, unstarted.c.node, unstarted.c.n_sends)
        .join(nodes, nodes.c.node == unstarted.c.node)
        .outerjoin(busy, (busy.c.node == unstarted.c.node) & (busy.c.stage == unstarted.c.stage))
        .where(unstarted.c.number <= slots - func.coalesce(busy.c.n, 0))
    )


_late = _statement_of_late()


def undelivered(connection: Connection, resend_after_s: float, limit: int) -> list[StageMessage]:
    """Return stages still queued although their message was sent; each message doubles the pause before the next."""
    rows = connection.execute(_late.limit(limit)).all()
    if rows:
        connection.execute(
            update(rollouts)
            .where(rollouts.c.rollout_id == bindparam("b_id"))
            .values(resend_at=db_now() + bindparam("b_pause"), n_sends=rollouts.c.n_sends + 1),
            sorted(
                (
                    {"b_id": row.rollout_id, "b_pause": min(MAX_PAUSE_S, resend_after_s * 2 ** min(row.n_sends, 10))}
                    for row in rows
                ),
                key=lambda names: str(names["b_id"]),
            ),
        )
    return [StageMessage(row.rollout_id, row.attempt, Stage(row.stage), str(row.node)) for row in rows]


def mark_unsent(connection: Connection, stage_messages: Sequence[StageMessage], resend_after_s: float) -> None:
    """Reset the pauses of messages that the broker did not take: the workers did not cause that."""
    statement = (
        update(rollouts)
        .where(
            rollouts.c.rollout_id == bindparam("b_id"),
            rollouts.c.attempt == bindparam("b_attempt"),
            rollouts.c.state == State.QUEUED.value,
        )
        .values(resend_at=db_now() + resend_after_s, n_sends=1)
    )
    connection.execute(
        statement,
        [{"b_id": message.rollout_id, "b_attempt": message.attempt} for message in _in_order_of_id(stage_messages)],
    )


def requeue_of_dead_nodes(connection: Connection, dead: Collection[str]) -> int:
    """Requeue the stages queued on dead nodes, from the start, as their sandboxes are lost. Returns how many."""
    queued = (_live, rollouts.c.state == State.QUEUED.value, rollouts.c.node.in_(sorted(dead)))
    lock_rollouts(connection, *queued)
    statement = (
        update(rollouts)
        .where(*queued)
        .values(node=None, attempt=rollouts.c.attempt + 1, queued_at=db_now(), ready_at=db_now())
    )
    back = statement.where(rollouts.c.stage != Stage.EVAL.value).values(stage=Stage.INIT.value)
    n = connection.execute(back).rowcount
    return n + connection.execute(statement.where(rollouts.c.stage == Stage.EVAL.value)).rowcount


def requeue_unstarted(connection: Connection, node: str) -> int:
    """Take rollouts and borrowed sandboxes that have not started off a node; no attempt is counted.

    Returns how many.
    """
    same_attempt = (attempts.c.rollout_id == rollouts.c.rollout_id, attempts.c.attempt == rollouts.c.attempt)
    placed_in_run = (rollouts.c.stage == Stage.RUN.value) & ~select(literal(1)).where(*same_attempt).exists()
    unbegun = (
        _live,
        rollouts.c.node == node,
        (rollouts.c.stage == Stage.INIT.value) | placed_in_run,
        rollouts.c.state == State.QUEUED.value,
    )
    lock_rollouts(connection, *unbegun)
    n = connection.execute(update(rollouts).where(*unbegun).values(node=None, stage=Stage.INIT.value)).rowcount
    return n + borrowed.give_up_unstarted(connection, node)


def requeue_all(connection: Connection, node: str) -> int:
    """Requeue all rollouts of a stopped node, active or queued, without counting a failed attempt.

    Only for callers that know that no worker of the node is left. Returns how many.
    """
    on_node = (_live, rollouts.c.node == node)
    lock_rollouts(connection, *on_node)
    active = connection.execute(
        select(rollouts.c.rollout_id, rollouts.c.attempt, rollouts.c.stage).where(
            *on_node, rollouts.c.state == State.ACTIVE.value
        )
    ).all()
    if active:
        held = [{"b_id": row.rollout_id, "b_attempt": row.attempt, "b_stage": row.stage} for row in active]
        reason = f"node {node} was drained, and its worker did not release the rollout in time"
        connection.execute(_unhold.values(failure_message=reason), held)
        connection.execute(attempt_ends, [{**each, "b_result": DRAINED, "b_error": reason} for each in held])
    return requeue_of_dead_nodes(connection, [node])


def requeue_of_predecessor(connection: Connection, node: str) -> int:
    """Expire the leases of a node's killed predecessor and requeue its queued rollouts. Returns how many."""
    held = (_live, rollouts.c.node == node, rollouts.c.state == State.ACTIVE.value)
    lock_rollouts(connection, _live, rollouts.c.node == node)
    lost = connection.execute(update(rollouts).where(*held).values(lease_expires_at=0.0)).rowcount
    return lost + requeue_of_dead_nodes(connection, [node])


def live_sandboxes(connection: Connection, node: str) -> set[tuple[str, int]]:
    """Return (rollout id, attempt) of all live rollouts on a node, whose sandboxes must stay."""
    statement = select(rollouts.c.rollout_id, rollouts.c.attempt).where(rollouts.c.node == node, _live)
    return {(row.rollout_id, row.attempt) for row in connection.execute(statement)}


def ended_or_requeued(connection: Connection, rollout_ids: Collection[str]) -> set[tuple[str, int]]:
    """Return (rollout id, attempt) of those attempts at these rollouts whose sandboxes must be ended at once.

    These are attempts that have ended, for example by a cancel, even if a worker still runs them; and attempts that
    were requeued after their start and before their run, as no worker holds their sandboxes.
    """
    run_attempts = attempts.alias()
    never_run = ~(
        select(literal(1))
        .where(
            run_attempts.c.rollout_id == attempts.c.rollout_id,
            run_attempts.c.attempt == attempts.c.attempt,
            run_attempts.c.stage == Stage.RUN.value,
        )
        .exists()
    )
    waited = (attempts.c.stage == Stage.INIT.value) & (attempts.c.result == "advanced") & never_run
    ended: set[tuple[str, int]] = set()
    for some in chunks(sorted(rollout_ids)):
        statement = (
            select(attempts.c.rollout_id, attempts.c.attempt)
            .join(rollouts, rollouts.c.rollout_id == attempts.c.rollout_id)
            .where(
                attempts.c.rollout_id.in_(some),
                rollouts.c.attempt > attempts.c.attempt,
                rollouts.c.finish_seq.is_not(None) | waited,
            )
        )
        ended.update((row.rollout_id, row.attempt) for row in connection.execute(statement))
    return ended
