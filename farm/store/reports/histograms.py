"""The histograms of all rollouts ever, kept in the store: each ended rollout is counted once.

The leading dispatcher counts the rollouts that ended since the last time, outside all transitions. So histograms only
grow: the process that serves them may end, and batches may be deleted. A rollout that is scored again before it was
counted is counted with its last score.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from sqlalchemy import ColumnElement, Connection, and_, case, func, insert, literal, or_, select, update

from farm.records.rollout import Outcome, Stage
from farm.retry_policy import CAUSES
from farm.store.locks import lock_batches
from farm.store.rollout_counts import sum_up
from farm.store.rollouts import attempts, batches, chunks, rewards, rollouts
from farm.store.sql.schema import HistogramRow, MeasuredBatchRow, ModelCallRow

_LARGEST = sys.float_info.max
_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10000.0)
_TOKENS = (16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)
_REWARDS = (0.0, 0.25, 0.5, 0.75, 1.0, 2.0, 5.0)
"""No bound is below 0, as such a histogram would have no sum. Rewards may be negative, so use `delta` on theirs."""

_MOST_BATCHES = 50
_MOST_ROLLOUTS = 1000
"""The number of one batch's rollouts that are counted at a time; the rest is counted in the next round."""
_histograms = HistogramRow.__table__
_measured = MeasuredBatchRow.__table__
_calls = ModelCallRow.__table__
_scored_before = (
    select(func.max(rewards.c.attempt))
    .where(rewards.c.rollout_id == rollouts.c.rollout_id, rewards.c.attempt < rollouts.c.attempt)
    .correlate(rollouts)
    .scalar_subquery()
)
"""The attempt of the previous score: everything up to it was counted with that score."""


@dataclass(frozen=True, slots=True)
class HistogramKind:
    """One histogram, or a counter if it has no buckets. `bounds` are the upper bounds of its buckets.

    All values of its label are known in advance, so that rollouts cannot add others.
    """

    name: str
    what: str
    bounds: Sequence[float]
    label: str = ""
    values: Sequence[str] = ("",)


REWARDS = HistogramKind("farm_reward", "Rewards of scored rollouts", _REWARDS)
TOKENS = HistogramKind("farm_response_tokens", "Tokens that the policy sampled in a completed run", _TOKENS)
TURNS = HistogramKind("farm_turns", "Turns of a completed run", (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0))
CALLS = HistogramKind("farm_model_call_seconds", "Seconds of one model call", _SECONDS)
WORK = HistogramKind("farm_stage_seconds", "Seconds of work on a stage", _SECONDS, "stage", [*map(str, Stage)])
QUEUED = HistogramKind(
    "farm_stage_queue_seconds", "Seconds that a stage was queued", _SECONDS, "stage", [*map(str, Stage)]
)
ROLLOUTS = HistogramKind("farm_rollout_seconds", "Seconds from submit to end of a rollout", _SECONDS)
ENDED = HistogramKind("farm_rollouts_ended", "Ended rollouts", (), "outcome", [*map(str, Outcome)])
ATTEMPTS = HistogramKind(
    "farm_attempts_ended", "Ended stages of attempts", (), "result", ["advanced", "completed", *CAUSES]
)

KINDS = {kind.name: kind for kind in (REWARDS, TOKENS, TURNS, CALLS, WORK, QUEUED, ROLLOUTS, ENDED, ATTEMPTS)}


@dataclass(slots=True)
class Counts:
    """The number of values in each bucket of a histogram, and their sum."""

    kind: HistogramKind
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.kind.bounds) + 1:
            # no counts, or counts of a version with other buckets
            self.counts, self.total = [0] * (len(self.kind.bounds) + 1), 0.0

    def count(self, values: Iterable[float]) -> None:
        for value in values:
            self.counts[bisect_left(self.kind.bounds, value)] += 1
            self._add_total(value)

    def add(self, counts: Sequence[int], total: float) -> None:
        """Add counts of another process."""
        self.counts = [one + other for one, other in zip(self.counts, counts, strict=True)]
        self._add_total(total)

    def _add_total(self, value: float) -> None:
        """Add to the sum, which stays finite: two infinite values may have no sum, and SQLite cannot store NaN."""
        self.total = max(-_LARGEST, min(_LARGEST, self.total + value))

    def cumulative(self) -> list[tuple[str, float]]:
        """Return cumulative buckets, as in Prometheus."""
        buckets, n = [], 0
        for bound, count in zip([*map(repr, self.kind.bounds), "+Inf"], self.counts, strict=True):
            n += count
            buckets.append((bound, float(n)))
        return buckets


Histograms: TypeAlias = dict[tuple[str, str], Counts]
"""Counts by the name of the histogram and the value of its label."""


def uncounted(connection: Connection) -> Sequence[tuple[str, int, int]]:
    """Return batches with uncounted rollouts, with the last counted and the last assigned number of each."""
    seq = func.coalesce(_measured.c.seq, 0)
    statement = (
        select(batches.c.batch_id, seq, batches.c.last_seq)
        .outerjoin(_measured, _measured.c.batch_id == batches.c.batch_id)
        .where(batches.c.last_seq > seq)
        .order_by(batches.c.created_at)
        .limit(_MOST_BATCHES)
    )
    return [
        (batch_id, after, min(last, after + _MOST_ROLLOUTS)) for batch_id, after, last in connection.execute(statement)
    ]


def counted(connection: Connection, batch_id: str, after: int, last: int) -> Histograms:
    """Return the histograms of the rollouts of a batch with end numbers in (`after`, `last`]."""
    row = rollouts.c
    columns = (row.rollout_id, row.state, row.outcome, row.reward, row.n_turns, row.n_response_tokens)
    duration = (row.finished_at - row.submitted_at).label("took_s")
    statement = select(*columns, duration, row.policy_outcome, func.coalesce(_scored_before, 0).label("before")).where(
        row.batch_id == batch_id, row.finish_seq > after, row.finish_seq <= last
    )
    histograms: Histograms = {}
    before: dict[int, list[str]] = {}
    for each in connection.execute(statement):
        before.setdefault(each.before, []).append(each.rollout_id)
        _of(histograms, ROLLOUTS.name).count([max(0.0, each.took_s)])
        _of(histograms, ENDED.name, each.outcome).count([1.0])
        if each.reward is not None:
            _of(histograms, REWARDS.name).count([each.reward])
        if each.policy_outcome is not None and not each.before:
            _of(histograms, TOKENS.name).count([each.n_response_tokens])
            _of(histograms, TURNS.name).count([each.n_turns])
    for attempt, ids in before.items():
        for some in chunks(ids):
            _count_stages(connection, histograms, attempts.c.rollout_id.in_(some), attempt)
            _count_calls(connection, histograms, _calls.c.rollout_id.in_(some), attempt)
    return histograms


def _of(histograms: Histograms, name: str, label: str = "") -> Counts:
    return histograms.setdefault((name, label), Counts(KINDS[name]))


def _count_stages(connection: Connection, histograms: Histograms, condition: ColumnElement[bool], before: int) -> None:
    columns = (
        *(attempts.c.stage, attempts.c.result),
        *(attempts.c.queued_at, attempts.c.started_at, attempts.c.finished_at),
    )
    ended = (condition, attempts.c.attempt > before, attempts.c.finished_at.is_not(None))
    for stage, result, queued_at, started_at, finished_at in connection.execute(
        select(*columns).where(*ended)
    ).tuples():
        _of(histograms, ATTEMPTS.name, result).count([1.0])
        _of(histograms, QUEUED.name, stage).count([max(0.0, started_at - queued_at)])
        _of(histograms, WORK.name, stage).count([max(0.0, finished_at - started_at)])


def _count_calls(connection: Connection, histograms: Histograms, condition: ColumnElement[bool], before: int) -> None:
    """Count calls in the database, as there are a hundred times as many as rollouts."""
    latency = _calls.c.latency_s
    edges = [(None, CALLS.bounds[0]), *zip(CALLS.bounds, CALLS.bounds[1:], strict=False), (CALLS.bounds[-1], None)]
    counts = [func.sum(case((_between(latency, low, high), 1), else_=0)) for low, high in edges]
    row = connection.execute(select(func.sum(latency), *counts).where(condition, _calls.c.attempt > before)).one()
    if row[0] is not None:
        _of(histograms, CALLS.name).add([int(n) for n in row[1:]], float(row[0]))


def _between(value: ColumnElement[Any], low: float | None, high: float | None) -> ColumnElement[bool]:
    bounds = [value > low] if low is not None else []
    return and_(*bounds, *([value <= high] if high is not None else []))


def add(connection: Connection, batch_id: str, after: int, last: int, histograms: Histograms) -> bool:
    """Add the counts of a batch; False if this was done already, by another process or an earlier try."""
    moved = update(_measured).where(_measured.c.batch_id == batch_id, _measured.c.seq == after).values(seq=last)
    if connection.execute(moved).rowcount == 0:
        uncounted = ~select(literal(1)).where(_measured.c.batch_id == batch_id).exists()
        # nothing is added for a batch that is gone, or that another process has begun to count
        source = select(batches.c.batch_id, literal(last)).where(
            batches.c.batch_id == batch_id, uncounted, literal(after) == 0
        )
        begin = insert(_measured).from_select(["batch_id", "seq"], source).returning(_measured.c.seq)
        # a concurrent rescore resets the sums of the batch, and would not see a new row
        lock_batches(connection, [batch_id])
        if connection.execute(begin).first() is None:
            return False
    sum_up(connection, batch_id, last)
    known = stored(connection, lock=True)
    for (name, label), counts in histograms.items():
        merged = known.get((name, label))
        values: dict[str, Any] = {"name": name, "label": label}
        if merged is None:
            connection.execute(insert(_histograms).values(**values, counts=counts.counts, total=counts.total))
            continue
        merged.add(counts.counts, counts.total)
        same_key = and_(_histograms.c.name == name, _histograms.c.label == label)
        connection.execute(update(_histograms).where(same_key).values(counts=merged.counts, total=merged.total))
    return True


def stored(connection: Connection, lock: bool = False) -> Histograms:
    """Return all histograms that have counts."""
    names = or_(*[_histograms.c.name == name for name in KINDS])
    statement = select(_histograms).where(names)
    rows = connection.execute(statement.with_for_update() if lock else statement)
    return {(row.name, row.label): Counts(KINDS[row.name], list(row.counts), row.total) for row in rows}


def complete(stored: Mapping[tuple[str, str], Counts]) -> Histograms:
    """Return the histograms with an empty one for each label value without counts."""
    keys = [(kind.name, value) for kind in KINDS.values() for value in kind.values]
    return {key: stored.get(key) or Counts(KINDS[key[0]]) for key in keys}
