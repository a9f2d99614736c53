"""Rollouts of a batch by stage and state, at a cost that does not grow with the number that has ended.

The leading dispatcher sums up ended rollouts per batch (`MeasuredBatchRow.ended`). A reader adds those that
ended since, and those that have not ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from functools import cache, lru_cache
from math import fsum
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Connection,
    Integer,
    Row,
    Select,
    String,
    bindparam,
    case,
    func,
    literal,
    null,
    or_,
    select,
    union_all,
    update,
)
from sqlalchemy import cast as sql_cast

from farm.records.rollout import Stage, State
from farm.store.rollouts import rollouts
from farm.store.sql.schema import MeasuredBatchRow

_measured = MeasuredBatchRow.__table__


SCALE = 2.0**-64


class RolloutCount(NamedTuple):
    """`n` rollouts of a batch that agree in stage, state and kind of failure, and the sums of their numbers.

    `rewards` is their sum times `SCALE`, as the sum itself may be beyond the range of a number. `n_begun` counts
    rollouts that a worker has claimed; it is 0 for rollouts that have ended.
    """

    batch_id: str
    stage: Stage
    state: State
    failure_kind: str | None
    n: int
    rewards: float
    n_mismatches: int
    n_invalid_actions: int
    n_begun: int = 0


def rollout_counts(connection: Connection, batch_ids: Collection[str]) -> list[RolloutCount]:
    """Return the counts of these batches at one moment; several may agree in all but their numbers."""
    summed: dict[str, tuple[int, list[Any]]] = {id: (0, []) for id in batch_ids}
    if not summed:
        return []
    while True:
        for id, seq, ended in connection.execute(_sums(), {"b_ids": list(summed)}):
            summed[id] = (seq, ended)
        counts: list[RolloutCount] = []
        now = dict.fromkeys(summed, 0)
        bound: dict[str, Any] = {"b_ids": list(summed)}
        for index, (id, (seq, _)) in enumerate(summed.items()):
            bound |= {f"b_id_{index}": id, f"b_seq_{index}": seq}
        for row in connection.execute(_not_summed(len(summed)), bound):
            if row.ended_seq is None:
                key = (row.batch_id, Stage(row.stage), State(row.state), row.failure_kind)
                counts.append(RolloutCount(*key, *_numbers(row), int(row.begun)))
            else:
                now[row.batch_id] = row.ended_seq
        # a reader has no snapshot beyond one statement: nothing was summed up or taken back between the two
        if all(now[id] == seq for id, (seq, _) in summed.items()):
            break
    for id, (_, ended) in summed.items():
        counts += [RolloutCount(id, Stage(stage), State(state), *rest) for stage, state, *rest in ended]
    return counts


@cache
def _sums() -> Select[Any]:
    return select(_measured.c.batch_id, _measured.c.ended_seq, _measured.c.ended).where(_measured.c.batch_id.in_(_IDS))


@lru_cache(maxsize=64)
def _not_summed(n_batches: int) -> CompoundSelect[Any]:
    """Return a statement for the rollouts of batches beyond numbers, and the numbers up to which there are sums now.

    Each part reads an index of its own, which holds what it asks for and little else.
    """
    row = rollouts.c
    live = row.finish_seq.is_(None)

    def beyond(index: int) -> ColumnElement[bool]:
        return (row.batch_id == bindparam(f"b_id_{index}")) & (row.finish_seq > bindparam(f"b_seq_{index}"))

    lately = or_(*map(beyond, range(n_batches)))
    none = [null().label(name) for name in ("stage", "state", "failure_kind", "n", "rewards", "mismatches", "invalid")]
    now = select(_measured.c.batch_id, *none, null().label("begun"), _measured.c.ended_seq)
    return union_all(
        _counts().where(live, row.node.is_(None), row.batch_id.in_(_IDS)).group_by(*_GROUP),
        # by node, of which all have fewer than the largest batch; as an expression the id leads to no index
        _counts().where(live, row.node > "", (row.batch_id + "").in_(_IDS)).group_by(*_GROUP),
        _counts().where(lately).group_by(*_GROUP),
        now.where(_measured.c.batch_id.in_(_IDS)),
    )


def mean_reward(counts: Iterable[RolloutCount]) -> float | None:
    """Return the mean reward of the completed rollouts of a batch; None if there are none."""
    completed = [count for count in counts if count.state is State.COMPLETED]
    n = sum(count.n for count in completed)
    return fsum(count.rewards for count in completed) / n / SCALE if n else None


def sum_up(connection: Connection, batch_id: str, last: int) -> None:
    """Add the rollouts that ended up to a number to the sums of their batch, whose row this transaction has locked."""
    where = _measured.c.batch_id == batch_id
    after, known = connection.execute(select(_measured.c.ended_seq, _measured.c.ended).where(where)).one()
    sums: defaultdict[tuple[str, str, str | None], list[Any]] = defaultdict(lambda: [0, 0.0, 0, 0])
    row = rollouts.c
    lately = _counts().where(row.batch_id == batch_id, row.finish_seq > after, row.finish_seq <= last)
    added = [
        (each.stage, each.state, each.failure_kind, *_numbers(each))
        for each in connection.execute(lately.group_by(*_GROUP))
    ]
    for stage, state, kind, *numbers in (*known, *added):
        total = sums[stage, state, kind]
        total[:] = (a + b for a, b in zip(total, numbers, strict=True))
    ended = [[*key, *numbers] for key, numbers in sums.items()]
    connection.execute(update(_measured).where(where).values(ended_seq=last, ended=ended))


def ended_sums(connection: Connection, batch_id: str) -> tuple[int, int]:
    """Return how many ended rollouts of a batch are summed up, and how many there are of them, at one moment."""
    for ended, n in connection.execute(_ended_sums(), {"b_id": batch_id}):
        return sum(each[3] for each in ended), n
    return 0, 0


@cache
def _ended_sums() -> Select[Any]:
    row, id = rollouts.c, bindparam("b_id", type_=String)
    n_ended = select(func.count(literal(1))).where(row.batch_id == id, row.finish_seq <= _measured.c.ended_seq)
    return select(_measured.c.ended, n_ended.scalar_subquery()).where(_measured.c.batch_id == id)


def forget(connection: Connection, batch_id: str) -> None:
    """Have the ended rollouts of a batch summed up again from the first, as some have not ended any more."""
    connection.execute(update(_measured).where(_measured.c.batch_id == batch_id).values(ended_seq=0, ended=[]))


def _counts() -> Select[Any]:
    row = rollouts.c
    # one that waits for its second stage, or for another attempt, is queued, too
    begun: ColumnElement[Any] = or_(row.stage != Stage.INIT.value, row.attempt > 1)
    return select(
        *_GROUP,
        func.count(literal(1)).label("n"),
        func.sum(row.reward * SCALE).label("rewards"),
        func.sum(row.n_mismatches).label("mismatches"),
        func.sum(row.n_invalid_actions).label("invalid"),
        func.sum(case((row.finish_seq.is_(None) & begun, 1), else_=0)).label("begun"),
        sql_cast(null(), Integer).label("ended_seq"),
    )


_GROUP = (rollouts.c.batch_id, rollouts.c.stage, rollouts.c.state, rollouts.c.failure_kind)
_IDS = bindparam("b_ids", type_=String, expanding=True)


def _numbers(row: Row[Any]) -> tuple[int, float, int, int]:
    return int(row.n), float(row.rewards or 0.0), int(row.mismatches), int(row.invalid)
