"""The promises, checked against the store and the clients' journals."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select

from farm.records.rollout import FINAL_STATES, Outcome, State
from farm.records.token_audit import check
from farm.store import batches, trajectories
from farm.store.database import Store
from farm.store.reports import audit
from farm.store.rollouts import attempts, rewards, rollouts
from farm.store.rollouts import batches as sent
from farm.store.trajectories import segment_rows
from tests.chaos import client
from tests.chaos.client import Order
from tests.chaos.problems import ExpectedScore
from tests.chaos.strikes import Interventions

_TOLERANCE = 1e-9
_FROM_OUTSIDE = frozenset({Outcome.SANDBOX_ERROR, Outcome.ENGINE_ERROR, Outcome.EVALUATOR_ERROR, Outcome.LOST})
_OF_PLUGINS = frozenset({Outcome.HANDLER_ERROR, Outcome.AGENT_ERROR, Outcome.EVALUATOR_ERROR})


@dataclass(frozen=True, slots=True)
class BrokenPromise:
    """A promise that was not kept: which, for whom, and how."""

    promise: str
    id: str
    what: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.id}: {self.what}" if self.id else f"{self.promise}: {self.what}"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence of a run: the farm's store, the clients' journals, the engines' seed, and deliberate interventions."""

    store: Store
    orders: Sequence[Order]
    seed: int
    done: Interventions


def all_of(seen: Evidence) -> list[BrokenPromise]:
    """Return all broken promises."""
    every = _rows(seen.store)
    result = list(_audited(seen.store))
    result += _poisoned([row for row in every if row.batch_id in seen.done.poisoned])
    rows = [row for row in every if row.batch_id not in seen.done.poisoned]
    result += _ended_once(rows, _requested(seen.orders))
    result += _scored_right(rows, seen)
    result += _failed(rows)
    result += _cancelled(rows, seen.done)
    result += _scores(rows, seen.store)
    result += _exact(rows, seen.store)
    return result + list(_delivered(rows, seen.orders, seen.done))


def _poisoned(rows: list[Any]) -> Iterator[BrokenPromise]:
    """Check that a plug-in that ends its process failed for good, with its own failure, or was cancelled."""
    for row in rows:
        if row.state not in (State.FAILED.value, State.CANCELLED.value):
            yield BrokenPromise("a poisonous plug-in fails", row.rollout_id, f"it is {row.state}")
        elif row.state == State.FAILED.value and row.failure_kind not in _OF_PLUGINS:
            yield BrokenPromise(
                "a poisonous plug-in fails", row.rollout_id, f"by {row.failure_kind}: {row.failure_message}"
            )


def _failed(rows: list[Any]) -> Iterator[BrokenPromise]:
    """Yield the rollouts that failed by an error of the farm's own code, not by an injected fault."""
    for row in rows:
        if row.state == State.FAILED.value and row.failure_kind not in _FROM_OUTSIDE:
            yield BrokenPromise("only injected faults fail a rollout", row.rollout_id, str(row.failure_message)[-400:])


def n_failed_by_cause(store: Store) -> Counter[str]:
    """Count the rollouts that failed for good, by cause."""
    return Counter(row.failure_kind or "?" for row in _rows(store) if row.state == State.FAILED.value)


def _rows(store: Store) -> list[Any]:
    columns = [rollouts.c[name] for name in _COLUMNS]
    return list(store.read(lambda connection: connection.execute(select(*columns)).all()))


_COLUMNS = (
    *("rollout_id", "batch_id", "group_index", "sample_index", "instance_id", "state", "attempt", "outcome"),
    *("reward", "failure_kind", "failure_message", "finish_seq", "n_segments"),
)


def _audited(store: Store) -> Iterator[BrokenPromise]:
    """Check that the farm's own audit finds nothing."""
    for batch_id in store.read(lambda connection: batches.recent(connection, 1_000_000)):
        for each in store.read(lambda connection, batch_id=batch_id: audit.violations(connection, batch_id)):  # type: ignore[misc]
            yield BrokenPromise("audit", each.id, each.what)


def _requested(orders: Sequence[Order]) -> dict[str, tuple[int, int]]:
    """Return batch → (instances, samples of each), from its request."""
    result = {}
    for order in orders:
        numbers = {line["batch_id"]: line["batch"] for line in client.read(order.journal) if "batch" in line}
        for batch_id, number in numbers.items():
            batch_request = order.request(number)
            result[batch_id] = len(batch_request.instances), batch_request.n_samples
    return result


def _ended_once(rows: list[Any], submitted: dict[str, tuple[int, int]]) -> Iterator[BrokenPromise]:
    """Yield missing, duplicated, unfinished and unsubmitted rollouts: each exists once, and has ended."""
    by_batch: defaultdict[str, Counter[tuple[int, int]]] = defaultdict(Counter)
    for row in rows:
        by_batch[row.batch_id][(row.group_index, row.sample_index)] += 1
        if row.state not in FINAL_STATES:
            yield BrokenPromise("every rollout ends", row.rollout_id, f"it is {row.state}")
    for batch_id in by_batch.keys() - submitted.keys():
        yield BrokenPromise("a batch is made once", batch_id, "no client has it: it was made twice, or never reported")
    for batch_id, (n_groups, n_samples) in submitted.items():
        wanted = Counter((group, sample) for group in range(n_groups) for sample in range(n_samples))
        if by_batch[batch_id] != wanted:
            yield BrokenPromise(
                "conservation", batch_id, f"{wanted - by_batch[batch_id]} lost, {by_batch[batch_id] - wanted} more"
            )


def _scored_right(rows: list[Any], seen: Evidence) -> Iterator[BrokenPromise]:
    """Check that rollouts are completed with the only right reward, or have none."""
    worth = ExpectedScore(seen.seed)
    seeds = {
        row.batch_id: row.request["sampling"]["seed"]
        for row in seen.store.read(lambda connection: connection.execute(select(sent.c.batch_id, sent.c.request)).all())
    }
    for row in rows:
        if row.state == State.COMPLETED.value:
            right = worth.reward(row.instance_id, seeds[row.batch_id], row.group_index, row.sample_index)
            if row.reward is None or abs(row.reward - right) > _TOLERANCE:
                what = f"{row.instance_id} ended as {row.outcome}: reward {row.reward}, not {right}"
                yield BrokenPromise("nothing broken is scored", row.rollout_id, what)
        elif row.reward is not None:
            yield BrokenPromise(
                "nothing broken is scored", row.rollout_id, f"it is {row.state} with reward {row.reward}"
            )


def _cancelled(rows: list[Any], done: Interventions) -> Iterator[BrokenPromise]:
    """Check that exactly the cancelled rollouts are cancelled."""
    cancelled = {row.rollout_id for row in rows if row.state == State.CANCELLED.value}
    for rollout_id in sorted(done.cancelled - cancelled):
        yield BrokenPromise("cancelled stays cancelled", rollout_id, "it was cancelled, and is not")
    for rollout_id in sorted(cancelled - done.cancelled - done.perhaps_cancelled):
        yield BrokenPromise("only requested cancels happen", rollout_id, "no client cancelled it")
    for row in rows:
        if (row.state == State.CANCELLED.value) != (row.outcome == Outcome.CANCELLED.value):
            yield BrokenPromise("cancelled stays cancelled", row.rollout_id, f"it is {row.state} as {row.outcome}")


def _scores(rows: list[Any], store: Store) -> Iterator[BrokenPromise]:
    """Check that there is a score for each completed scoring, no other, and the same each time."""
    scored = select(attempts.c.rollout_id, attempts.c.attempt).where(attempts.c.result == "completed")
    statement = select(rewards.c.rollout_id, rewards.c.attempt, rewards.c.value)
    scorings = Counter(tuple(row) for row in store.read(lambda connection: connection.execute(scored).all()))
    scores = store.read(lambda connection: connection.execute(statement).all())
    counted = Counter((row.rollout_id, row.attempt) for row in scores)
    for (rollout_id, attempt), n in ((scorings - counted) + (counted - scorings)).items():
        yield BrokenPromise(
            "a score for each scoring", rollout_id, f"attempt {attempt}: {n} more of one than of the other"
        )
    values: defaultdict[str, set[float]] = defaultdict(set)
    for row in scores:
        values[row.rollout_id].add(row.value)
    for row in rows:
        if row.state == State.COMPLETED.value and len(values[row.rollout_id]) != 1:
            yield BrokenPromise(
                "the same score each time", row.rollout_id, f"its scores are {sorted(values[row.rollout_id])}"
            )


def _exact(rows: list[Any], store: Store) -> Iterator[BrokenPromise]:
    """Check that training rows contain the sampled tokens."""
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


def _exact_one(store: Store, rollout_id: str, made: Any, attempt: int | None) -> Iterator[BrokenPromise]:
    if not made:
        yield BrokenPromise("token exactness", rollout_id, "it is completed without training rows")
        return
    calls = store.read(lambda connection: trajectories.calls(connection, rollout_id, attempt))
    try:
        check(made, calls)
    except ValueError as error:
        yield BrokenPromise("token exactness", rollout_id, str(error))


def _delivered(rows: list[Any], orders: Sequence[Order], done: Interventions) -> Iterator[BrokenPromise]:
    """Check that every group was delivered to its client, complete each time, and unchanged unless rescored since."""
    by_group: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for row in rows:
        by_group[f"{row.batch_id}.{row.group_index}"][row.rollout_id] = row
    value: defaultdict[str, list[list[dict[str, Any]]]] = defaultdict(list)
    for order in orders:
        for line in client.read(order.journal):
            if "group_id" in line:
                value[line["group_id"]].append(line["rollouts"])
    for group in by_group.keys() - value.keys():
        # an open one is reported elsewhere, and is not lost
        if all(row.state in FINAL_STATES for row in by_group[group].values()):
            yield BrokenPromise("every group is delivered", group, "no client was given it")
    for group, times in value.items():
        members = by_group.get(group)
        if members is None:
            yield BrokenPromise("nothing is lost", group, "it was given, and is not there")
            continue
        for result in times:
            if {each["rollout_id"] for each in result} != members.keys():
                yield BrokenPromise("groups are whole", group, f"{len(result)} of {len(members)} were given")
            else:
                yield from _unchanged(result, members, done)


def _unchanged(
    delivered: list[dict[str, Any]], members: dict[str, Any], done: Interventions
) -> Iterator[BrokenPromise]:
    for each in delivered:
        row = members[each["rollout_id"]]
        # the segments of a cancelled one are made from the calls recorded at the time of each request
        names = ("state", "outcome", "reward", *(("n_segments",) if row.state == State.COMPLETED.value else ()))
        differ = [name for name in names if each[name] != getattr(row, name)]
        if each["finish_seq"] == row.finish_seq and differ:
            what = ", ".join(f"{name} {each[name]}, now {getattr(row, name)}" for name in differ)
            yield BrokenPromise("delivered rollouts stay unchanged", row.rollout_id, what)
        if each["finish_seq"] != row.finish_seq and row.rollout_id not in done.rescored:
            what = f"it was given as number {each['finish_seq']}, and is number {row.finish_seq}"
            yield BrokenPromise("every rollout ends once", row.rollout_id, what)
