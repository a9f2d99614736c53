"""The promises, held against what is in the store and what the clients were given."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select

from benchmarks.chaos import client
from benchmarks.chaos.client import Order
from benchmarks.chaos.problems import Worth
from benchmarks.chaos.strikes import Interventions
from farm.exactness import check
from farm.rollout import FINAL_STATES, Outcome, State
from farm.store import audit, batches, trajectories
from farm.store.engine import Store
from farm.store.rollouts import attempts, rewards, rollouts
from farm.store.rollouts import batches as sent
from farm.store.trajectories import segment_rows

_TOLERANCE = 1e-9
_FROM_OUTSIDE = frozenset({Outcome.SANDBOX_ERROR, Outcome.ENGINE_ERROR, Outcome.EVALUATOR_ERROR, Outcome.LOST})


@dataclass(frozen=True, slots=True)
class Broken:
    """A promise that was not kept: which, for whom, and how."""

    promise: str
    id: str
    what: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.id}: {self.what}" if self.id else f"{self.promise}: {self.what}"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is looked at: the farm's store, the clients' journals, the engines' seed, what was done on purpose."""

    store: Store
    orders: Sequence[Order]
    seed: int
    done: Interventions


def all_of(seen: Evidence) -> list[Broken]:
    """Everything that is wrong, by promise."""
    rows = _rows(seen.store)
    found = list(_audited(seen.store))
    found += _ended_once(rows, _asked(seen.orders))
    found += _scored_right(rows, seen)
    found += _failed(rows)
    found += _cancelled(rows, seen.done)
    found += _scores(rows, seen.store)
    found += _exact(rows, seen.store)
    return found + list(_delivered(rows, seen.orders, seen.done))


def _failed(rows: list[Any]) -> Iterator[Broken]:
    """What failed for good did so by a fault that can be injected from outside, not by one of the farm's own code."""
    for row in rows:
        if row.state == State.FAILED.value and row.failure_kind not in _FROM_OUTSIDE:
            yield Broken("faults from outside alone fail a rollout", row.rollout_id, str(row.failure_message)[-400:])


def given_up(store: Store) -> Counter[str]:
    """How many rollouts failed for good, by cause: all of them by our doing, as no other is failed."""
    return Counter(row.failure_kind or "?" for row in _rows(store) if row.state == State.FAILED.value)


def _rows(store: Store) -> list[Any]:
    columns = [rollouts.c[name] for name in _COLUMNS]
    return list(store.read(lambda connection: connection.execute(select(*columns)).all()))


_COLUMNS = (
    *("rollout_id", "batch_id", "group_index", "sample_index", "instance_id", "state", "attempt", "outcome"),
    *("reward", "failure_kind", "failure_message", "finish_seq", "n_segments"),
)


def _audited(store: Store) -> Iterator[Broken]:
    """The farm's own audit finds nothing."""
    for batch_id in store.read(lambda connection: batches.recent(connection, 1_000_000)):
        for each in store.read(lambda connection, batch_id=batch_id: audit.violations(connection, batch_id)):  # type: ignore[misc]
            yield Broken("audit", each.id, each.what)


def _asked(orders: Sequence[Order]) -> dict[str, tuple[int, int]]:
    """Batch → (instances, samples of each), as its request says."""
    found = {}
    for order in orders:
        numbers = {line["batch_id"]: line["batch"] for line in client.read(order.journal) if "batch" in line}
        for batch_id, number in numbers.items():
            asked = order.request(number)
            found[batch_id] = len(asked.instances), asked.n_samples
    return found


def _ended_once(rows: list[Any], asked: dict[str, tuple[int, int]]) -> Iterator[Broken]:
    """What was submitted is all there, once, and has ended; and nothing else is."""
    by_batch: defaultdict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    for row in rows:
        by_batch[row.batch_id][(row.group_index, row.sample_index)] += 1
        if row.state not in FINAL_STATES:
            yield Broken("every rollout ends", row.rollout_id, f"it is {row.state}")
    for batch_id in by_batch.keys() - asked.keys():
        yield Broken("a batch is made once", batch_id, "no client has it: it was made twice, or never told")
    for batch_id, (n_groups, n_samples) in asked.items():
        wanted = Counter((group, sample) for group in range(n_groups) for sample in range(n_samples))
        if by_batch[batch_id] != wanted:
            yield Broken(
                "conservation", batch_id, f"{wanted - by_batch[batch_id]} lost, {by_batch[batch_id] - wanted} more"
            )


def _scored_right(rows: list[Any], seen: Evidence) -> Iterator[Broken]:
    """Completed with the one right reward, or without any."""
    worth = Worth(seen.seed)
    seeds = {
        row.batch_id: row.request["sampling"]["seed"]
        for row in seen.store.read(lambda connection: connection.execute(select(sent.c.batch_id, sent.c.request)).all())
    }
    for row in rows:
        if row.state == State.COMPLETED.value:
            right = worth.reward(row.instance_id, seeds[row.batch_id], row.sample_index)
            if row.reward is None or abs(row.reward - right) > _TOLERANCE:
                what = f"{row.instance_id} ended as {row.outcome}: reward {row.reward}, not {right}"
                yield Broken("nothing broken is scored", row.rollout_id, what)
        elif row.reward is not None:
            yield Broken("nothing broken is scored", row.rollout_id, f"it is {row.state} with reward {row.reward}")


def _cancelled(rows: list[Any], done: Interventions) -> Iterator[Broken]:
    """Cancelled are those that were cancelled."""
    cancelled = {row.rollout_id for row in rows if row.state == State.CANCELLED.value}
    for rollout_id in sorted(done.cancelled - cancelled):
        yield Broken("cancelled stays cancelled", rollout_id, "it was cancelled, and is not")
    for rollout_id in sorted(cancelled - done.cancelled - done.perhaps_cancelled):
        yield Broken("only what is cancelled is", rollout_id, "nobody has cancelled it")
    for row in rows:
        if (row.state == State.CANCELLED.value) != (row.outcome == Outcome.CANCELLED.value):
            yield Broken("cancelled stays cancelled", row.rollout_id, f"it is {row.state} as {row.outcome}")


def _scores(rows: list[Any], store: Store) -> Iterator[Broken]:
    """A score for each scoring that ended, and none besides; the same each time."""
    scored = select(attempts.c.rollout_id, attempts.c.attempt).where(attempts.c.result == "completed")
    given = select(rewards.c.rollout_id, rewards.c.attempt, rewards.c.value)
    scorings = Counter(tuple(row) for row in store.read(lambda connection: connection.execute(scored).all()))
    scores = store.read(lambda connection: connection.execute(given).all())
    counted = Counter((row.rollout_id, row.attempt) for row in scores)
    for (rollout_id, attempt), n in ((scorings - counted) + (counted - scorings)).items():
        yield Broken("a score for each scoring", rollout_id, f"attempt {attempt}: {n} more of one than of the other")
    values: defaultdict[str, set[float]] = defaultdict(set)
    for row in scores:
        values[row.rollout_id].add(row.value)
    for row in rows:
        if row.state == State.COMPLETED.value and len(values[row.rollout_id]) != 1:
            yield Broken("the same score each time", row.rollout_id, f"its scores are {sorted(values[row.rollout_id])}")


def _exact(rows: list[Any], store: Store) -> Iterator[Broken]:
    """Training rows hold what was sampled, token by token."""
    kept = select(segment_rows.c.rollout_id, func.max(segment_rows.c.attempt)).group_by(segment_rows.c.rollout_id)
    of_attempt = dict(tuple(row) for row in store.read(lambda connection: connection.execute(kept).all()))
    by_batch: defaultdict[str, list[Any]] = defaultdict(list)
    for row in rows:
        if row.state == State.COMPLETED.value and not row.instance_id.startswith("noop"):
            by_batch[row.batch_id].append(row)
    for batch_id, members in by_batch.items():
        made = store.read(lambda connection, key=batch_id: trajectories.segments_of(connection, key))  # type: ignore[misc]
        for row in members:
            yield from _exact_one(store, row.rollout_id, made.get(row.rollout_id, ()), of_attempt.get(row.rollout_id))


def _exact_one(store: Store, rollout_id: str, made: Any, attempt: int | None) -> Iterator[Broken]:
    if not made:
        yield Broken("token exactness", rollout_id, "it is completed without training rows")
        return
    calls = store.read(lambda connection: trajectories.calls(connection, rollout_id, attempt))
    try:
        check(made, calls)
    except ValueError as error:
        yield Broken("token exactness", rollout_id, str(error))


def _delivered(rows: list[Any], orders: Sequence[Order], done: Interventions) -> Iterator[Broken]:
    """Every group was given to its client, whole each time, and as it is if it has not been scored again since."""
    by_group: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for row in rows:
        by_group[f"{row.batch_id}.{row.group_index}"][row.rollout_id] = row
    told: defaultdict[str, list[list[dict[str, Any]]]] = defaultdict(list)
    for order in orders:
        for line in client.read(order.journal):
            if "group_id" in line:
                told[line["group_id"]].append(line["rollouts"])
    for group in by_group.keys() - told.keys():
        yield Broken("every group is delivered", group, "no client was given it")
    for group, times in told.items():
        members = by_group.get(group)
        if members is None:
            yield Broken("every group is delivered", group, "it was given, and is not there")
            continue
        for given in times:
            if {each["rollout_id"] for each in given} != members.keys():
                yield Broken("groups are whole", group, f"{len(given)} of {len(members)} were given")
            else:
                yield from _as_told(given, members, done)


def _as_told(told: list[dict[str, Any]], members: dict[str, Any], done: Interventions) -> Iterator[Broken]:
    for each in told:
        row = members[each["rollout_id"]]
        # those of a cancelled one are made of what is recorded, whenever it is asked for
        names = ("state", "outcome", "reward", *(("n_segments",) if row.state == State.COMPLETED.value else ()))
        differ = [name for name in names if each[name] != getattr(row, name)]
        if each["finish_seq"] == row.finish_seq and differ:
            what = ", ".join(f"{name} {each[name]}, now {getattr(row, name)}" for name in differ)
            yield Broken("what is delivered stays so", row.rollout_id, what)
        if each["finish_seq"] != row.finish_seq and row.rollout_id not in done.rescored:
            what = f"it was given as number {each['finish_seq']}, and is number {row.finish_seq}"
            yield Broken("every rollout ends once", row.rollout_id, what)
