"""What must always be true of a batch, asked of the database: nothing lost, nothing twice, nothing broken scored.

Each question is one statement, so it sees one snapshot on SQLite and on Postgres: transitions that go on meanwhile
raise no false alarm, and any connection will do. The rules of a rollout are columns of one statement that reads the
batch once, so that the dispatcher can ask all the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

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
from farm.rollout import FINAL_STATES, POLICY_OUTCOMES, Outcome, Stage, State, group_id
from farm.store.clock import db_now
from farm.store.rollouts import attempts, batches, rewards, rollouts
from farm.store.tables import DeliveryRow, InstanceRow, SegmentRow

_instances = cast(Table, InstanceRow.__table__)
_segments = cast(Table, SegmentRow.__table__)
_deliveries = cast(Table, DeliveryRow.__table__)

_RECENT_S = 600.0
_LARGEST = 1.7e308
"""Between this and its negative lies every number that is neither infinite nor no number, on both databases."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must never be: the id of the rollout, group or batch, and a sentence about it."""

    id: str
    what: str

    def __str__(self) -> str:
        return f"{self.id}: {self.what}"


@dataclass(frozen=True, slots=True)
class Count:
    """How many rollouts a batch or a group has, by how they ended; `n_in_flight` are queued or active."""

    id: str
    n_submitted: int
    n_completed: int
    n_failed: int
    n_cancelled: int
    n_in_flight: int

    @property
    def n_found(self) -> int:
        return self.n_completed + self.n_failed + self.n_cancelled + self.n_in_flight

    @property
    def holds(self) -> bool:
        """Whether what was submitted is all there, once."""
        return self.n_submitted == self.n_found


@dataclass(frozen=True, slots=True)
class Conservation:
    """The numbers of a batch and of each of its groups, in order."""

    batch: Count
    groups: tuple[Count, ...]

    @property
    def off(self) -> tuple[Count, ...]:
        """What does not add up, the batch first."""
        return tuple(count for count in (self.batch, *self.groups) if not count.holds)


def conservation(connection: Connection, batch_id: str) -> Conservation:
    """Submitted against completed, failed, cancelled and in flight, of one moment. Raises NotFound."""

    def counted(*states: State) -> ColumnElement[int]:
        return func.sum(case((rollouts.c.state.in_(states), 1), else_=0))

    here = and_(
        rollouts.c.batch_id == _instances.c.batch_id,
        rollouts.c.group_index == _instances.c.group_index,
    )
    rows = connection.execute(
        select(
            _instances.c.group_index,
            batches.c.n_samples,
            batches.c.n_rollouts,
            counted(State.COMPLETED),
            counted(State.FAILED),
            counted(State.CANCELLED),
            # whatever else a row may say it has not ended
            func.count(rollouts.c.rollout_id) - counted(*FINAL_STATES),
        )
        .select_from(batches)
        .join(_instances, _instances.c.batch_id == batches.c.batch_id)
        .outerjoin(rollouts, here)
        .where(batches.c.batch_id == batch_id)
        .group_by(_instances.c.group_index, batches.c.n_samples, batches.c.n_rollouts)
        .order_by(_instances.c.group_index)
    ).all()
    if not rows:
        raise NotFound(f"there is no batch {batch_id}")
    groups = tuple(Count(group_id(batch_id, row[0]), row[1], *map(int, row[3:])) for row in rows)
    totals = [sum(column) for column in zip(*(row[3:] for row in rows), strict=True)]
    return Conservation(Count(batch_id, rows[0][2], *map(int, totals)), groups)


def violations(connection: Connection, batch_id: str, limit: int = 1000) -> list[Violation]:
    """Everything about a batch and its rollouts that must never be, at most `limit` of them. Raises NotFound."""
    found = [
        Violation(each.id, f"{each.n_submitted} rollouts were submitted, {each.n_found} are there")
        for each in conservation(connection, batch_id).off
    ]
    found += _of_batch(connection, batch_id)
    found += _of_rollouts(connection, batch_id, limit)
    return found[:limit]


def open_batches(connection: Connection) -> list[str]:
    """The batches with rollouts that have not ended or did so a short while ago, oldest first."""
    # each reads an index: of what has not ended, and one entry of each batch, however large they are
    live = batches.c.batch_id.in_(select(rollouts.c.batch_id).where(rollouts.c.finish_seq.is_(None)))
    last = (rollouts.c.batch_id == batches.c.batch_id, rollouts.c.finish_seq == batches.c.last_seq)
    lately = select(literal(1)).where(*last, rollouts.c.finished_at > db_now() - _RECENT_S).exists()
    statement = select(batches.c.batch_id).where(or_(live, lately)).order_by(batches.c.created_at)
    return list(connection.execute(statement).scalars())


def _of_batch(connection: Connection, batch_id: str) -> list[Violation]:
    """Numbers that were given out twice, and acknowledgements of what never was."""
    twice = (
        select(rollouts.c.finish_seq, func.count(literal(1)))
        .where(rollouts.c.batch_id == batch_id, rollouts.c.finish_seq.is_not(None))
        .group_by(rollouts.c.finish_seq)
        .having(func.count(literal(1)) > 1)
    )
    beyond = (
        select(_deliveries.c.consumer, _deliveries.c.cursor, batches.c.last_seq)
        .join(batches, batches.c.batch_id == _deliveries.c.batch_id)
        .where(batches.c.batch_id == batch_id, _deliveries.c.cursor > batches.c.last_seq)
    )
    found = [Violation(batch_id, f"{n} rollouts ended as number {seq}") for seq, n in connection.execute(twice)]
    return found + [
        Violation(batch_id, f"{consumer} has acknowledged {cursor}, but only {last} were given out")
        for consumer, cursor, last in connection.execute(beyond)
    ]


_FACTS = ("stage", "state", "attempt", "outcome", "reward", "finish_seq", "owner", "n_failures", "n_lost")


def _of_rollouts(connection: Connection, batch_id: str, limit: int) -> list[Violation]:
    rows = connection.execute(_broken(), {"b_batch": batch_id, "b_limit": limit})
    return [
        Violation(row.rollout_id, f"{sentence} ({_said(row)})")
        for row in rows
        for index, (sentence, _) in enumerate(_RULES)
        if getattr(row, f"rule_{index}")
    ]


def _said(row: Row[Any]) -> str:
    return ", ".join(f"{name} {getattr(row, name)}" for name in _FACTS if getattr(row, name) is not None)


_row = rollouts.c
_final = _row.state.in_(sorted(FINAL_STATES))
_completed = _row.state == State.COMPLETED.value
_active = _row.state == State.ACTIVE.value
_in_eval = _row.stage == Stage.EVAL.value
_ended = (_row.finish_seq, _row.finished_at, _row.outcome)
_policys = sorted(POLICY_OUTCOMES)
_ours = sorted(set(Outcome) - POLICY_OUTCOMES - {Outcome.CANCELLED})


def _any(table: Table, *conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """Whether the rollout has such rows there. Each look is one of the primary key, whatever the planner believes."""
    return select(literal(1)).where(table.c.rollout_id == _row.rollout_id, *conditions).correlate(rollouts).exists()


def _count(table: Table, *conditions: ColumnElement[bool]) -> ColumnElement[int]:
    """How many such rows the rollout has there."""
    mine = select(func.count(literal(1))).where(table.c.rollout_id == _row.rollout_id, *conditions)
    return mine.correlate(rollouts).scalar_subquery()


def _without(table: Table, other: Table, *conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    """That a row of a table has no such row of the same attempt in another."""
    same = (other.c.rollout_id == table.c.rollout_id, other.c.attempt == table.c.attempt, *conditions)
    return ~select(literal(1)).where(*same).correlate(table).exists()


_under_way = attempts.c.finished_at.is_(None)
_owners = and_(
    attempts.c.attempt == _row.attempt,
    attempts.c.stage == _row.stage,
    attempts.c.worker == _row.owner,
    attempts.c.node == _row.node,
)
_played = and_(attempts.c.stage == Stage.RUN.value, attempts.c.result == "advanced")
_scoring = and_(attempts.c.stage == Stage.EVAL.value, attempts.c.result == "completed")

_RULES: Sequence[tuple[str, ColumnElement[bool]]] = (
    ("its state or its stage is none", or_(_row.state.not_in(sorted(State)), _row.stage.not_in(sorted(Stage)))),
    ("it has ended without number, instant or outcome", and_(_final, or_(*(each.is_(None) for each in _ended)))),
    (
        "it has not ended, but has a number, an instant or an outcome",
        and_(not_(_final), or_(*(each.is_not(None) for each in _ended))),
    ),
    ("its number was never given out", or_(_row.finish_seq < 1, _row.finish_seq > batches.c.last_seq)),
    ("it is completed without a reward", and_(_completed, _row.reward.is_(None))),
    ("its reward is no finite number", not_(_row.reward.between(-_LARGEST, _LARGEST))),
    (
        "its reward is not its newest score",
        and_(
            _completed,
            not_(_any(rewards, rewards.c.attempt == _row.attempt, rewards.c.value == _row.reward)),
        ),
    ),
    (
        "it is completed, but the policy did not end it so",
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
    ("it was scored in an attempt that never was", _any(rewards, rewards.c.attempt > _row.attempt)),
    (
        "it has a score that was not given, or was given one that it has not",
        or_(
            _any(rewards, _without(rewards, attempts, _scoring)),
            _any(attempts, _scoring, _without(attempts, rewards)),
        ),
    ),
    (
        "it has failed, but not by a fault that has a name",
        and_(
            _row.state == State.FAILED.value,
            or_(_row.failure_kind.is_(None), _row.outcome != _row.failure_kind, _row.outcome.not_in(_ours)),
        ),
    ),
    (
        "it is cancelled and not, at once",
        (_row.state == State.CANCELLED.value) != (func.coalesce(_row.outcome, "") == Outcome.CANCELLED.value),
    ),
    (
        "it is active without owner, lease or node",
        and_(_active, or_(_row.owner.is_(None), _row.lease_expires_at.is_(None), _row.node.is_(None))),
    ),
    (
        "it is not active, but somebody owns it",
        and_(not_(_active), or_(_row.owner.is_not(None), _row.lease_expires_at.is_not(None))),
    ),
    (
        "it is active, but its owner's is not the one attempt under way",
        and_(_active, or_(not_(_any(attempts, _under_way, _owners)), _count(attempts, _under_way) > 1)),
    ),
    ("it is not active, but an attempt is under way", and_(not_(_active), _any(attempts, _under_way))),
    ("it has an attempt that never was", or_(_row.attempt < 1, _any(attempts, attempts.c.attempt > _row.attempt))),
    (
        "it has failed, was lost or was played anew more often than its batch allows",
        or_(
            _row.n_failures > batches.c.max_attempts,
            _row.n_lost > batches.c.max_losses + 1,
            _row.n_restarts > batches.c.max_attempts + 1,
        ),
    ),
    ("it has failed or was lost less often than never", or_(_row.n_failures < 0, _row.n_lost < 0)),
    ("it is to be played where no sandbox is", and_(not_(_final), _row.stage == Stage.RUN.value, _row.node.is_(None))),
    (
        "it is to be scored, but was not played to the end, once",
        and_(
            _in_eval,
            or_(_row.policy_outcome.is_(None), _row.submission.is_(None), _count(attempts, _played) != 1),
        ),
    ),
    (
        "it was not played to the end, but has what comes of that",
        and_(
            not_(_in_eval),
            or_(_row.policy_outcome.is_not(None), _row.submission.is_not(None), _any(attempts, _played)),
        ),
    ),
    ("it has another number of training rows than it says", _count(_segments) != _row.n_segments),
    (
        "it has training rows of an attempt that does not count",
        _any(_segments, _without(_segments, attempts, _played)),
    ),
)
"""What must never be true of a rollout: how to say it, and how to ask. What is unknown is not true."""


@lru_cache(maxsize=1)
def _broken() -> Select[Any]:
    """The rollouts of which something is true that must not be, and what."""
    told = [case((wrong, 1), else_=0).label(f"rule_{index}") for index, (_, wrong) in enumerate(_RULES)]
    return (
        select(_row.rollout_id, *(_row[name] for name in _FACTS), *told)
        .join(batches, batches.c.batch_id == _row.batch_id)
        .where(_row.batch_id == bindparam("b_batch"), or_(*(wrong for _, wrong in _RULES)))
        .order_by(_row.group_index, _row.sample_index)
        .limit(bindparam("b_limit", type_=Integer))
    )
