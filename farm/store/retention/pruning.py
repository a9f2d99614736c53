"""Removal of data that ended long ago, in small transactions. Pruning may stop after any of them; the next run resumes.

A batch is marked first, in the transaction that checks that all of it has ended, and then removed rollout by rollout.
So requested data is either complete or refused with the error Pruned, and no part can be scored again in between. Never
pruned: batches with open rollouts, pinned ones, batches with a recent acknowledgement, and all batches of a training
run that is going on.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sqlalchemy import ColumnElement, Connection, Table, and_, delete, func, literal, or_, select, update

from farm.errors import NotFound, Pruned
from farm.settings import Settings
from farm.store.blobs.artefacts import artefacts
from farm.store.blobs.stored_annotations import annotation_rows, of_tokens
from farm.store.blobs.stored_experts import call_experts
from farm.store.consumers import deliveries, steps
from farm.store.database import Store, Work
from farm.store.locks import lock_batches, lock_rollouts
from farm.store.nodes import nodes
from farm.store.retention.kept import RetentionLevel
from farm.store.rollouts import attempts, batches, instances, rewards, rollouts
from farm.store.sql.clock import age_of, db_now
from farm.store.sql.schema import TerminalPositionRow
from farm.store.trajectories import model_calls, segment_rows

T = TypeVar("T")
positions = TerminalPositionRow.__table__

_FIRST, _MOST = 4, 512
"""Rollouts per transaction, at first and at most."""
_WITHIN_S = 0.05
"""The target time of a transaction: others write in between."""
_PAGES = 256
"""Pages that SQLite returns to the file system at a time."""
_LOCK_S, _PAUSE_S = 20.0, 0.01
"""Seconds to wait for the write lock of a SQLite file, and between two such steps."""
_DAY_S = 86_400.0
_NODE_S = 7 * _DAY_S
"""Seconds after which a silent node is removed."""


@dataclass(frozen=True, slots=True)
class PrunedBatch:
    """A batch of which something was, or would be, removed."""

    batch_id: str
    n_rollouts: int
    ended_at: float
    kept: RetentionLevel


class Pruner:
    """Prunes a store. `goes_on` is asked before each transaction. None of its methods holds a lock for long.

    `pause_s` is the pause after each transaction, as a multiple of the transaction's time.
    """

    def __init__(self, store: Store, goes_on: Callable[[], bool] = lambda: True, pause: float = 1.0) -> None:
        self._store = store
        self._goes_on = goes_on
        self._pause = pause
        self._n = _FIRST

    def candidates(
        self, older_s: float, kept: RetentionLevel, batch_ids: Collection[str] | None = None
    ) -> list[PrunedBatch]:
        """Return the batches that would be pruned, oldest first, including half pruned ones."""
        ids = self._store.read(lambda connection: _old(connection, older_s, kept, batch_ids))
        batches = [self._store.read(lambda connection, id=id: _prunable(connection, id, older_s, kept)) for id in ids]  # type: ignore[misc]
        return [each for each in batches if each is not None]

    def prune(
        self,
        older_s: float,
        kept: RetentionLevel,
        batch_ids: Collection[str] | None = None,
        on_marked: Callable[[PrunedBatch], object] = lambda batch: None,
    ) -> list[PrunedBatch]:
        """Prune batches older than so many seconds, except for what `kept` keeps. Returns the completed batches."""
        done = []
        for candidate in self.candidates(older_s, kept, batch_ids):
            marked = self._write(lambda connection, id=candidate.batch_id: _mark(connection, id, older_s, kept))  # type: ignore[misc]
            if marked is None or not self._goes_on():
                continue
            if self._remove(marked):
                done.append(marked)
                on_marked(marked)
        if done:
            self._vacuum()
        return done

    def forget(self, older_s: float) -> int:
        """Remove nodes that were silent for a week, and old step records of ended runs. Returns how many."""
        return self._write(_forget_nodes) + (self._write(lambda connection: _forget_steps(connection, older_s)))

    def _remove(self, batch: PrunedBatch) -> bool:
        """Remove all of a marked batch that is not kept; False if stopped."""
        last = (-1, -1)
        while True:
            if not self._goes_on():
                return False
            n, after = self._n, last
            some = self._store.read(lambda connection: _next(connection, batch, after, n))  # noqa: B023
            if not some:
                break
            ids = [rollout_id for rollout_id, _, _ in some]
            self._timed(lambda connection: _remove_rollouts(connection, batch, ids))  # noqa: B023
            last = some[-1][1], some[-1][2]
        group: int | None = -1
        while group is not None:
            if not self._goes_on():
                return False
            first = group
            group = self._timed(lambda connection: _remove_instances(connection, batch, first, self._n))  # noqa: B023
        self._write(lambda connection: _finish(connection, batch))
        return True

    def _timed(self, work: Work[T]) -> T:
        """Write, and set the size of the next transaction by the time of this one."""
        began = time.monotonic()
        value = self._write(work)
        took_s = time.monotonic() - began
        if took_s > _WITHIN_S:
            self._n = max(1, self._n // 2)
        elif took_s < _WITHIN_S / 2:
            self._n = min(_MOST, self._n * 2)
        return value

    def _write(self, work: Work[T]) -> T:
        began = time.monotonic()
        value = self._store.write(work)
        time.sleep(min(1.0, self._pause * (time.monotonic() - began)))
        return value

    def _vacuum(self) -> None:
        """Return free pages of a SQLite file to the file system, a few at a time; Postgres has autovacuum."""
        path = self._store.engine.url.database
        if self._store.engine.dialect.name != "sqlite" or not path:
            return
        with contextlib.closing(sqlite3.connect(path, timeout=_LOCK_S, isolation_level=None)) as connection:
            left = _free_pages(connection)
            while left and self._goes_on():
                began = time.monotonic()
                # the statement takes a step for each page, which only a script makes
                connection.executescript(f"PRAGMA incremental_vacuum({_PAGES})")
                before, left = left, _free_pages(connection)
                if left >= before:
                    return
                # pause at least as long as it held the lock: others wait for that
                time.sleep(self._pause * max(_PAUSE_S, min(1.0, time.monotonic() - began)))


def _free_pages(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA freelist_count").fetchone()[0])


def ages(settings: Settings) -> list[tuple[float, RetentionLevel]]:
    """Return the farm's own retention rules: (age in seconds, what is kept of batches that ended so long ago)."""
    days = (
        (settings.keep_rewards_days, RetentionLevel.NOTHING),
        (settings.keep_trajectories_days, RetentionLevel.REWARDS),
    )
    return [(each * _DAY_S, kept) for each, kept in days if each]


def pin(connection: Connection, batch_id: str, pinned: bool) -> None:
    """Pin a batch, so that it is never pruned, or unpin it. Raises NotFound, and Pruned if it is too late."""
    lock_batches(connection, [batch_id])
    row = connection.execute(select(batches.c.pruned).where(batches.c.batch_id == batch_id)).one_or_none()
    if row is None:
        raise NotFound(f"there is no batch {batch_id}")
    if row.pruned and pinned:
        raise Pruned(f"batch {batch_id} was already pruned: its {row.pruned} are kept as they are")
    connection.execute(update(batches).where(batches.c.batch_id == batch_id).values(pinned=int(pinned)))


def _old(connection: Connection, older_s: float, kept: RetentionLevel, batch_ids: Collection[str] | None) -> list[str]:
    """Return the batches that were submitted so long ago and have more than `kept` left."""
    chosen = literal(True) if batch_ids is None else batches.c.batch_id.in_(sorted(batch_ids))
    more = batches.c.pruned.not_in([kept.value, *kept.less])
    half = and_(batches.c.pruned != "", batches.c.pruned_at.is_(None))
    old = and_(more, batches.c.pinned == 0, db_now() - batches.c.created_at > older_s)
    statement = select(batches.c.batch_id).where(chosen, or_(half, old)).order_by(batches.c.created_at)
    return list(connection.execute(statement).scalars())


def _prunable(connection: Connection, batch_id: str, older_s: float, kept: RetentionLevel) -> PrunedBatch | None:
    """Return a batch that may be pruned now; a marked one continues with its own level."""
    row = connection.execute(select(batches).where(batches.c.batch_id == batch_id)).one_or_none()
    if row is None:
        return None
    of_batch = rollouts.c.batch_id == batch_id
    last = select(rollouts.c.finished_at).where(of_batch, rollouts.c.finish_seq.is_not(None))
    ended_at = connection.execute(last.order_by(rollouts.c.finish_seq.desc()).limit(1)).scalar_one_or_none()
    if row.pruned and row.pruned_at is None:
        level = RetentionLevel(row.pruned) if row.pruned in [kept.value, *kept.less] else kept
        return PrunedBatch(batch_id, row.n_rollouts, ended_at or row.created_at, level)
    is_open = select(literal(1)).where(of_batch, rollouts.c.finish_seq.is_(None)).limit(1)
    if row.pinned or connection.execute(is_open).first() is not None:
        return None
    if kept is RetentionLevel.NOTHING and _has_last_position(connection, batch_id):
        return None
    cutoff = connection.execute(select(db_now() - older_s)).scalar_one()
    if (ended_at or row.created_at) >= cutoff or _is_consumed(connection, batch_id, row.run, cutoff):
        return None
    return PrunedBatch(batch_id, row.n_rollouts, ended_at or row.created_at, kept)


def _has_last_position(connection: Connection, batch_id: str) -> bool:
    """Return whether a batch has the last position of a protocol, from which the next are counted: then it stays."""
    own = positions.alias()
    later = (
        select(literal(1)).where(positions.c.protocol == own.c.protocol, positions.c.position > own.c.position).exists()
    )
    statement = select(literal(1)).select_from(own).where(own.c.batch_id == batch_id, ~later)
    return connection.execute(statement).first() is not None


def _is_consumed(connection: Connection, batch_id: str, run: str, cutoff: float) -> bool:
    """Return whether a consumer of a batch, or its training run, was active since `cutoff`."""
    lately = select(literal(1)).where(deliveries.c.batch_id == batch_id, deliveries.c.acknowledged_at >= cutoff)
    if connection.execute(lately.limit(1)).first() is not None:
        return True
    return bool(run) and run not in _ended_runs(connection, cutoff, run)


def _ended_runs(connection: Connection, cutoff: float, run: str | None = None) -> set[str]:
    """Return the training runs that recorded no step and submitted and acknowledged nothing since `cutoff`."""
    names = select(steps.c.run).where(_is(steps.c.run, run)).union(select(batches.c.run).where(_is(batches.c.run, run)))
    alive = (
        select(steps.c.run)
        .where(_is(steps.c.run, run), steps.c.created_at >= cutoff)
        .union(
            select(batches.c.run).where(_is(batches.c.run, run), batches.c.created_at >= cutoff),
            select(batches.c.run)
            .join(deliveries, deliveries.c.batch_id == batches.c.batch_id)
            .where(_is(batches.c.run, run), deliveries.c.acknowledged_at >= cutoff),
            select(batches.c.run)
            .join(rollouts, rollouts.c.batch_id == batches.c.batch_id)
            .where(_is(batches.c.run, run), rollouts.c.finish_seq.is_(None)),
        )
    )
    return {*connection.execute(names).scalars()} - {*connection.execute(alive).scalars()}


def _is(column: ColumnElement[str], run: str | None) -> ColumnElement[bool]:
    return column != "" if run is None else column == run


def _mark(connection: Connection, batch_id: str, older_s: float, kept: RetentionLevel) -> PrunedBatch | None:
    """Mark a batch as being pruned, if it still may be. From then on none of it is scored again."""
    lock_batches(connection, [batch_id])
    batch = _prunable(connection, batch_id, older_s, kept)
    if batch is not None:
        marked = {"pruned": batch.kept.value, "pruned_at": None}
        connection.execute(update(batches).where(batches.c.batch_id == batch_id).values(**marked))
    return batch


def _next(connection: Connection, batch: PrunedBatch, after: tuple[int, int], n: int) -> Sequence[tuple[str, int, int]]:
    """Return the next rollouts with data to remove; a resumed run skips the finished ones."""
    group, sample = rollouts.c.group_index, rollouts.c.sample_index
    later = or_(group > after[0], and_(group == after[0], sample > after[1]))
    more = {
        RetentionLevel.TRAJECTORIES: or_(
            _any_of(artefacts), _any_of(model_calls, model_calls.c.attempt < _newest_attempt(model_calls))
        ),
        # a rollout that never began has no data
        RetentionLevel.REWARDS: or_(_any_of(attempts), _any_of(model_calls)),
        RetentionLevel.NOTHING: literal(True),
    }
    conditions = (rollouts.c.batch_id == batch.batch_id, later, more[batch.kept])
    statement = select(rollouts.c.rollout_id, group, sample).where(*conditions).order_by(group, sample).limit(n)
    return [(id, g, s) for id, g, s in connection.execute(statement).tuples()]


def _any_of(table: Table, *conditions: ColumnElement[bool]) -> ColumnElement[bool]:
    statement = select(literal(1)).where(table.c.rollout_id == rollouts.c.rollout_id, *conditions)
    return statement.correlate(rollouts).exists()


def _newest_attempt(table: Table) -> ColumnElement[int]:
    """Return the number of the last attempt with calls, for the rollout of the row of `table`."""
    other = model_calls.alias()
    newest = select(func.max(other.c.attempt)).where(other.c.rollout_id == table.c.rollout_id)
    return newest.correlate(table).scalar_subquery()


def _remove_rollouts(connection: Connection, batch: PrunedBatch, ids: Sequence[str]) -> int:
    """Remove the data of these rollouts that is not kept, each rollout completely."""
    lock_rollouts(connection, rollouts.c.rollout_id.in_(ids))
    n = _delete(connection, artefacts, artefacts.c.rollout_id.in_(ids))
    if batch.kept is RetentionLevel.TRAJECTORIES:
        for table in (call_experts, model_calls):
            earlier = and_(table.c.rollout_id.in_(ids), table.c.attempt < _newest_attempt(table))
            n += _delete(connection, table, earlier)
        return n
    tables = [call_experts, model_calls, segment_rows, attempts]
    if batch.kept is RetentionLevel.NOTHING:
        tables.append(rewards)
    n += sum(_delete(connection, table, table.c.rollout_id.in_(ids)) for table in tables)
    n += _delete(connection, annotation_rows, of_tokens(ids))
    if batch.kept is RetentionLevel.NOTHING:
        return n + _delete(connection, rollouts, rollouts.c.rollout_id.in_(ids))
    kept_no_more = and_(rollouts.c.rollout_id.in_(ids), rollouts.c.submission.is_not(None))
    return n + connection.execute(update(rollouts).where(kept_no_more).values(submission=None)).rowcount


def _delete(connection: Connection, table: Table, condition: ColumnElement[bool]) -> int:
    return connection.execute(delete(table).where(condition)).rowcount


def _remove_instances(connection: Connection, batch: PrunedBatch, after: int, n: int) -> int | None:
    """Remove the contents of the next instances, and their references to task archives; return the last, if any."""
    of_batch = instances.c.batch_id == batch.batch_id
    later = select(instances.c.group_index).where(of_batch, instances.c.group_index > after)
    some = list(connection.execute(later.order_by(instances.c.group_index).limit(n)).scalars())
    if not some or batch.kept is RetentionLevel.TRAJECTORIES:
        return None
    chosen = and_(of_batch, instances.c.group_index.between(some[0], some[-1]))
    if batch.kept is RetentionLevel.NOTHING:
        connection.execute(delete(instances).where(chosen))
    else:
        connection.execute(update(instances).where(chosen).values(fields={}, archive=""))
    return int(some[-1])


def _finish(connection: Connection, batch: PrunedBatch) -> None:
    is_batch = batches.c.batch_id == batch.batch_id
    if batch.kept is RetentionLevel.NOTHING:
        connection.execute(delete(batches).where(is_batch))
    else:
        connection.execute(update(batches).where(is_batch).values(pruned_at=db_now()))


def _forget_nodes(connection: Connection) -> int:
    placed = select(literal(1)).where(rollouts.c.node == nodes.c.node, rollouts.c.finish_seq.is_(None)).exists()
    return _delete(connection, nodes, and_(age_of(nodes.c.heartbeat_at) > _NODE_S, ~placed))


def _forget_steps(connection: Connection, older_s: float) -> int:
    """Remove all but the newest step of runs that ended so long ago."""
    cutoff = connection.execute(select(db_now() - older_s)).scalar_one()
    n = 0
    for run in sorted(_ended_runs(connection, cutoff)):
        newest = select(func.max(steps.c.step)).where(steps.c.run == run).scalar_subquery()
        n += _delete(connection, steps, and_(steps.c.run == run, steps.c.step < newest))
    return n
