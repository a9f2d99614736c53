"""The invariants of a batch, checked in the database: nothing lost, nothing doubled, no broken rollout scored.

Each check is one statement, so it sees one snapshot on SQLite and on Postgres: concurrent transitions raise no false
alarm, and any connection will do. The rules for rollouts are columns of one statement that reads a part of the batch
once. The dispatcher checks all the time, part by part, because it shares its connection with other work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Integer,
    Row,
    Select,
    Table,
    and_,
    bindparam,
    case,
    func,
    literal,
    not_,
    or_,
    select,
)

from farm.errors import NotFound
from farm.ids import group_id
from farm.records.rollout import FINAL_STATES, POLICY_OUTCOMES, Conservation, Count, Outcome, Stage, State, Violation
from farm.store import rollout_counts
from farm.store.retention.kept import RetentionLevel
from farm.store.rollouts import attempts, batches, instances, newest_score, rewards, rollouts
from farm.store.sql.clock import db_now
from farm.store.sql.schema import DeliveryRow, SegmentRow

_segments = SegmentRow.__table__
_deliveries = DeliveryRow.__table__

_RECENT_S = 600.0
LIMIT = 1000
"""The maximum number of violations reported per batch."""
_PART = 256
"""Rollouts audited per statement: about 50 ms."""
_LARGEST = 1.7e308
"""Every finite number lies between this and its negative, in both databases; infinity and NaN do not."""


def conservation(connection: Connection, batch_id: str) -> Conservation:
    """Return the submitted, ended and in-flight counts at one moment. Raises NotFound."""
    rows = connection.execute(_groups(), {"b_batch": batch_id}).all()
    if not rows:
        raise NotFound(f"there is no batch {batch_id}")
    groups = tuple(Count(group_id(batch_id, row[0]), row[1], *map(int, row[3:])) for row in rows)
    totals = [sum(column) for column in zip(*(row[3:] for row in rows), strict=True)]
    return Conservation(Count(batch_id, rows[0][2], *map(int, totals)), groups)


@cache
def _groups() -> Select[Any]:
    """Return the statement for the counts of each group of a batch."""

    def counted(*states: State) -> ColumnElement[int]:
        return func.sum(case((rollouts.c.state.in_(states), 1), else_=0))

    same_group = and_(
        rollouts.c.batch_id == instances.c.batch_id,
        rollouts.c.group_index == instances.c.group_index,
    )
    return (
        select(
            instances.c.group_index,
            batches.c.n_samples,
            batches.c.n_rollouts,
            counted(State.COMPLETED),
            counted(State.FAILED),
            counted(State.CANCELLED),
            # whatever else its row says, it has not ended
            func.count(rollouts.c.rollout_id) - counted(*FINAL_STATES),
        )
        .select_from(batches)
        .join(instances, instances.c.batch_id == batches.c.batch_id)
        .outerjoin(rollouts, same_group)
        .where(batches.c.batch_id == bindparam("b_batch"))
        .group_by(instances.c.group_index, batches.c.n_samples, batches.c.n_rollouts)
        .order_by(instances.c.group_index)
    )


def violations(connection: Connection, batch_id: str) -> list[Violation]:
    """Return the violated invariants of a batch and its rollouts, at most `LIMIT`. Raises NotFound."""
    numbers, violations = of_batch(connection, batch_id)
    for groups in parts(numbers):
        violations += of_rollouts(connection, batch_id, groups)
    return violations[:LIMIT]


def parts(numbers: Conservation) -> Iterator[range]:
    """Yield ranges of a batch's groups, each with some hundred rollouts."""
    n_groups = len(numbers.groups)
    n_samples = max(1, numbers.batch.n_submitted // n_groups)
    step = max(1, _PART // n_samples)
    for start in range(0, n_groups, step):
        yield range(start, min(start + step, n_groups))


def of_batch(connection: Connection, batch_id: str) -> tuple[Conservation, list[Violation]]:
    """Return the counts of a batch, and the violated invariants of the batch as a whole. Raises NotFound."""
    numbers = conservation(connection, batch_id)
    violations = [
        Violation(each.id, f"{each.n_submitted} rollouts were submitted, {each.n_found} are there")
        for each in numbers.off
    ]
    return numbers, violations + _of_numbers_given(connection, batch_id)


def open_batches(connection: Connection) -> list[str]:
    """Return the batches with rollouts that are open or ended a short while ago, oldest first."""
    # each reads an index: of open rollouts, and one entry per batch, however large the tables are
    live = batches.c.batch_id.in_(select(rollouts.c.batch_id).where(rollouts.c.finish_seq.is_(None)))
    last = (rollouts.c.batch_id == batches.c.batch_id, rollouts.c.finish_seq == batches.c.last_seq)
    lately = select(literal(1)).where(*last, rollouts.c.finished_at > db_now() - _RECENT_S).exists()
    statement = select(batches.c.batch_id).where(or_(live, lately)).order_by(batches.c.created_at)
    return list(connection.execute(statement).scalars())


def _of_numbers_given(connection: Connection, batch_id: str) -> list[Violation]:
    """Return numbers that were assigned twice, and acknowledgements beyond the last number."""
    bound = {"b_batch": batch_id}
    violations = [
        Violation(batch_id, f"{n} rollouts ended as number {seq}")
        for seq, n in connection.execute(_assigned_twice(), bound)
    ]
    summed, counted = rollout_counts.ended_sums(connection, batch_id)
    if summed != counted:
        violations.append(Violation(batch_id, f"{summed} ended rollouts are summed up, {counted} are there"))
    return violations + [
        Violation(batch_id, f"{consumer} has acknowledged {cursor}, but only {last} were given out")
        for consumer, cursor, last in connection.execute(_acknowledged_beyond(), bound)
    ]


@cache
def _assigned_twice() -> Select[Any]:
    return (
        select(rollouts.c.finish_seq, func.count(literal(1)))
        .where(rollouts.c.batch_id == bindparam("b_batch"), rollouts.c.finish_seq.is_not(None))
        .group_by(rollouts.c.finish_seq)
        .having(func.count(literal(1)) > 1)
    )


@cache
def _acknowledged_beyond() -> Select[Any]:
    return (
        select(_deliveries.c.consumer, _deliveries.c.cursor, batches.c.last_seq)
        .join(batches, batches.c.batch_id == _deliveries.c.batch_id)
        .where(batches.c.batch_id == bindparam("b_batch"), _deliveries.c.cursor > batches.c.last_seq)
    )


_FACTS = ("stage", "state", "attempt", "outcome", "reward", "finish_seq", "owner", "n_failures", "n_lost")


def of_rollouts(connection: Connection, batch_id: str, groups: range) -> list[Violation]:
    """Return the violated invariants of the rollouts of these groups of a batch."""
    bound = {"b_batch": batch_id, "b_first": groups.start, "b_end": groups.stop, "b_limit": LIMIT}
    rows = connection.execute(_broken(), bound)
    return [
        Violation(row.rollout_id, f"{sentence} ({_facts_of(row)})")
        for row in rows
        for index, (sentence, _) in enumerate(_RULES)
        if getattr(row, f"rule_{index}")
    ]


def _facts_of(row: Row[Any]) -> str:
    return ", ".join(f"{name} {getattr(row, name)}" for name in _FACTS if getattr(row, name) is not None)


_row = rollouts.c
_final = _row.state.in_(sorted(FINAL_STATES))
_completed = _row.state == State.COMPLETED.value
_active = _row.state == State.ACTIVE.value
_in_eval = _row.stage == Stage.EVAL.value
_ended = (_row.finish_seq, _row.finished_at, _row.outcome)
_policys = sorted(POLICY_OUTCOMES)
_whole = batches.c.pruned.in_(["", RetentionLevel.TRAJECTORIES.value])
_ours = sorted(set(Outcome) - POLICY_OUTCOMES - {Outcome.CANCELLED})


def _any(table: Table, *conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return the condition that the rollout has such rows; looked up by primary key, whatever the planner estimates."""
    statement = select(literal(1)).where(table.c.rollout_id == _row.rollout_id, *conditions).correlate(rollouts)
    return _one_by_one(statement).exists()


def _one_by_one(statement: Select[Any]) -> Select[Any]:
    """Return a query that Postgres runs separately for each row, instead of reading the whole table at once.

    Most rows belong to ended rollouts, and the cost of a batch's audit must not grow with them. Only an OFFSET prevents
    the planner from reading them all.
    """
    return statement.offset(0)


def _count(table: Table, *conditions: ColumnElement[bool]) -> ColumnElement[int]:
    """Return the number of such rows of the rollout, as a subquery."""
    statement = select(func.count(literal(1))).where(table.c.rollout_id == _row.rollout_id, *conditions)
    return statement.correlate(rollouts).scalar_subquery()


def _without(table: Table, other: Table, *conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """Return the condition that a row has no matching row of the same attempt in another table."""
    same = (other.c.rollout_id == table.c.rollout_id, other.c.attempt == table.c.attempt, *conditions)
    return ~_one_by_one(select(literal(1)).where(*same).correlate(table)).exists()


_under_way = attempts.c.finished_at.is_(None)
_owners = and_(
    attempts.c.attempt == _row.attempt,
    attempts.c.stage == _row.stage,
    attempts.c.worker == _row.owner,
    attempts.c.node == _row.node,
)
_run_advanced = and_(attempts.c.stage == Stage.RUN.value, attempts.c.result == "advanced")
_scoring = and_(attempts.c.stage == Stage.EVAL.value, attempts.c.result == "completed")

_RULES: Sequence[tuple[str, ColumnElement[bool]]] = (
    ("its state or its stage is unknown", or_(_row.state.not_in(sorted(State)), _row.stage.not_in(sorted(Stage)))),
    ("it has ended without number, time or outcome", and_(_final, or_(*(each.is_(None) for each in _ended)))),
    (
        "it has not ended, but has a number, a time or an outcome",
        and_(not_(_final), or_(*(each.is_not(None) for each in _ended))),
    ),
    ("its number was never assigned", or_(_row.finish_seq < 1, _row.finish_seq > batches.c.last_seq)),
    ("it is completed without a reward", and_(_completed, _row.reward.is_(None))),
    ("its reward is not finite", not_(_row.reward.between(-_LARGEST, _LARGEST))),
    (
        "its reward is not its newest score",
        and_(_completed, or_(newest_score.is_(None), newest_score != _row.reward)),
    ),
    (
        "it is completed, but its outcome is not one of the policy",
        and_(
            _completed,
            or_(_row.outcome.not_in(_policys), _row.policy_outcome.is_(None), _row.outcome != _row.policy_outcome),
        ),
    ),
    ("it is completed, but not scored", and_(_completed, or_(not_(_in_eval), _row.failure_kind.is_not(None)))),
    ("it is not completed, but has a reward", and_(not_(_completed), _row.reward.is_not(None))),
    (
        "this attempt was scored, but it is not completed",
        and_(not_(_completed), _any(rewards, rewards.c.attempt == _row.attempt)),
    ),
    ("it was scored once, and ended without a score", and_(_final, not_(_completed), _any(rewards))),
    ("it was scored in an attempt that does not exist", _any(rewards, rewards.c.attempt > _row.attempt)),
    (
        "its scores and its scoring attempts do not match",
        and_(
            _whole,
            or_(
                _any(rewards, _without(rewards, attempts, _scoring)),
                _any(attempts, _scoring, _without(attempts, rewards)),
            ),
        ),
    ),
    (
        "it has failed without a known kind of failure",
        and_(
            _row.state == State.FAILED.value,
            or_(_row.failure_kind.is_(None), _row.outcome != _row.failure_kind, _row.outcome.not_in(_ours)),
        ),
    ),
    (
        "its state and its outcome disagree on whether it is cancelled",
        (_row.state == State.CANCELLED.value) != (func.coalesce(_row.outcome, "") == Outcome.CANCELLED.value),
    ),
    (
        "it is active without owner, lease or node",
        and_(_active, or_(_row.owner.is_(None), _row.lease_expires_at.is_(None), _row.node.is_(None))),
    ),
    (
        "it is not active, but has an owner",
        and_(not_(_active), or_(_row.owner.is_not(None), _row.lease_expires_at.is_not(None))),
    ),
    (
        "it is active, but its owner does not have the only open attempt",
        and_(_active, or_(not_(_any(attempts, _under_way, _owners)), _count(attempts, _under_way) > 1)),
    ),
    ("it is not active, but has an open attempt", and_(not_(_active), _any(attempts, _under_way))),
    (
        "it has an attempt after its last",
        or_(_row.attempt < 1, _any(attempts, attempts.c.attempt > _row.attempt)),
    ),
    (
        "it has failed, was lost or was restarted more often than its batch allows",
        or_(
            _row.n_failures > batches.c.max_attempts,
            _row.n_lost > batches.c.max_losses + 1,
            _row.n_restarts > batches.c.max_attempts + 1,
        ),
    ),
    ("it has a negative count of failures or losses", or_(_row.n_failures < 0, _row.n_lost < 0)),
    ("it is to be run, but has no node", and_(not_(_final), _row.stage == Stage.RUN.value, _row.node.is_(None))),
    (
        "it is to be scored, but does not have exactly one completed run",
        and_(
            _whole,
            _in_eval,
            or_(_row.policy_outcome.is_(None), _row.submission.is_(None), _count(attempts, _run_advanced) != 1),
        ),
    ),
    (
        "it has the results of a run, but no completed run",
        and_(
            not_(_in_eval),
            or_(_row.policy_outcome.is_not(None), _row.submission.is_not(None), _any(attempts, _run_advanced)),
        ),
    ),
    ("its number of training rows differs from its count", and_(_whole, _count(_segments) != _row.n_segments)),
    (
        "it has training rows of an attempt that does not count",
        _any(_segments, _without(_segments, attempts, _run_advanced)),
    ),
)
"""Violations of a rollout's invariants: description and condition. A condition that is NULL is not true."""


@cache
def _broken() -> Select[Any]:
    """Select the rollouts that violate a rule, and which rules."""
    rules = [case((wrong, 1), else_=0).label(f"rule_{index}") for index, (_, wrong) in enumerate(_RULES)]
    return (
        select(_row.rollout_id, *(_row[name] for name in _FACTS), *rules)
        .join(batches, batches.c.batch_id == _row.batch_id)
        .where(_row.batch_id == bindparam("b_batch"), or_(*(wrong for _, wrong in _RULES)))
        .where(_row.group_index >= bindparam("b_first"), _row.group_index < bindparam("b_end"))
        .order_by(_row.group_index, _row.sample_index)
        .limit(bindparam("b_limit", type_=Integer))
    )
