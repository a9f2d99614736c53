"""Closing of failed or lost attempts: retry, give up, or quarantine the instance.

Workers and the dispatcher close attempts only here, with the retry decision for each cause. Budgets are read in the
same transaction, so no decision uses outdated numbers.

The quarantine of an instance in its batch, after repeated failed attempts without any scored sample, is decided in the
transaction of a failure, from the stored attempts. So it needs no state of its own, and every process decides alike.
Samples that wait for their run then fail at once; those that are running, or wait to be scored, may still end with a
score, but are not retried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, bindparam, case, exists, select, update

from farm.ids import group_id
from farm.records.rollout import Failure, State
from farm.retry_policy import SUSPECTS, Budget, RetryDecision, is_left, pause_s
from farm.store import nodes
from farm.store import rollouts as transitions
from farm.store.locks import lock_rollouts
from farm.store.rollouts import Claim, attempts, batches, ended_unscored, instances, rewards, rollouts
from farm.store.sql.clock import db_now

_SPENT: Mapping[Budget, tuple[str, str, str]] = {
    Budget.FAILURES: ("n_failures", "max_attempts", "no attempt of {most} is left"),
    Budget.LOSSES: ("n_lost", "max_losses", "it was lost {n} times, and its batch allows {most}"),
    Budget.RESTARTS: ("n_restarts", "max_attempts", "it was restarted {most} times, which is the limit"),
}
"""For each budget: its counter, its limit, and the message when it is used up."""

_TRIES = 2
"""One sample must have failed this often: if all samples fail once at the same moment, the moment is the cause."""


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """The settings for failed attempts; as in `Settings`."""

    retry_s: float
    node_timeout_s: float


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """The result of closing an attempt: it is retried after `again_in_s`, or not at all if that is None, for `failure`.

    `n_quarantined` other samples of its instance were failed with it.
    """

    failure: Failure
    again_in_s: float | None
    n_quarantined: int = 0

    @property
    def in_words(self) -> str:
        if self.again_in_s is not None:
            return f"to be tried again in {self.again_in_s:.1f} s"
        return f"given up, with {self.n_quarantined} more of its instance" if self.n_quarantined else "given up"


def end_attempt(
    connection: Connection, held: Claim, failure: Failure, decision: RetryDecision, retry_settings: RetrySettings
) -> AttemptEnd | None:
    """Close an attempt that ended with `failure`; None if the claim is gone."""
    if decision.of_instance:
        # the batch is locked before its rollouts, so that samples that fail at the same moment see each other
        connection.execute(
            update(batches).where(batches.c.batch_id == held.batch_id).values(last_seq=batches.c.last_seq)
        )
    budgets = _budgets(connection, held)
    if budgets is None:
        return None
    group = QuarantineGroup(held.batch_id, held.group_index, budgets["quarantine_after"], budgets["max_attempts"])
    suspicion = group.suspicion(connection, held, failure, retry_settings.node_timeout_s)
    has_left, counted, spent = _counted(budgets, decision.budget)
    if suspicion is None and has_left:
        n = next(iter(counted.values()), 0)
        wait_s = pause_s(decision.budget, n, retry_settings.retry_s)
        requeued = transitions.requeue(connection, held, failure, counted | {"ready_at": db_now() + wait_s})
        return AttemptEnd(failure, wait_s) if requeued else None
    reason = suspicion.message if suspicion is not None else spent
    kind = decision.outcome if suspicion is None or decision.of_instance else suspicion.kind
    last = Failure(kind, f"{failure.message}; {reason}" if reason else failure.message)
    if not transitions.fail(connection, held, last, counted, failure):
        return None
    return AttemptEnd(last, None, group.fail_queued(connection, suspicion) if suspicion is not None else 0)


def _budgets(connection: Connection, held: Claim) -> dict[str, int] | None:
    """Return the counters of a rollout and their limits; None if the attempt is over."""
    statement = (
        select(
            *rollouts.c["n_failures", "n_lost", "n_restarts"],
            *batches.c["max_attempts", "max_losses", "quarantine_after"],
        )
        .join(batches, batches.c.batch_id == rollouts.c.batch_id)
        .where(rollouts.c.rollout_id == held.rollout_id, rollouts.c.attempt == held.attempt)
    )
    row = connection.execute(statement).one_or_none()
    return None if row is None else row._asdict()


def _counted(budgets: Mapping[str, int], budget: Budget) -> tuple[bool, dict[str, Any], str]:
    """Return whether another attempt is left, the counter with this one, and the reason if none is left."""
    if budget not in _SPENT:
        return is_left(budget, 0, 0), {}, ""
    counter, bound, words = _SPENT[budget]
    n, most = budgets[counter] + 1, budgets[bound]
    has_left = is_left(budget, n, most)
    return has_left, {counter: n}, "" if has_left or most == 1 else words.format(n=n, most=most)


@dataclass(frozen=True, slots=True)
class QuarantineGroup:
    """All samples of one instance, and the limits of its batch."""

    batch_id: str
    group_index: int
    quarantine_after: int
    max_attempts: int

    @property
    def _members(self) -> tuple[ColumnElement[bool], ...]:
        return rollouts.c.batch_id == self.batch_id, rollouts.c.group_index == self.group_index

    def suspicion(
        self, connection: Connection, ending: Claim, failure: Failure, node_timeout_s: float
    ) -> Failure | None:
        """Return the reason for a quarantine, given that an attempt ends with this failure; None without a reason."""
        if not self.quarantine_after:
            return None
        suspects = self._failed(connection)
        if failure.kind in SUSPECTS:
            suspects.append((ending.rollout_id, ending.node, failure))
        if len(suspects) < self.quarantine_after or self._was_scored(connection):
            return None
        names = sorted({node for _, node, _ in suspects})
        most_often = max(Counter(rollout_id for rollout_id, _, _ in suspects).values())
        if most_often < min(_TRIES, self.max_attempts):
            return None
        if len(names) < 2 and nodes.n_healthy(connection, node_timeout_s) > 1:
            return None
        first = suspects[0][2]
        sentence = (
            f"{self._name(connection)} is in quarantine: {len(suspects)} attempts at it failed on {', '.join(names)} "
            f"and none was scored; the first failed with {first.kind}: {first.message}"
        )
        return Failure(first.kind, sentence)

    def fail_queued(self, connection: Connection, failure: Failure) -> int:
        """Fail its samples that wait for their run. Returns how many. The batch's row must be locked."""
        ids = self._waiting(connection)
        if not ids:
            return 0
        numbered = (
            update(batches)
            .where(batches.c.batch_id == self.batch_id)
            .values(last_seq=batches.c.last_seq + len(ids))
            .returning(batches.c.last_seq)
        )
        first_seq = connection.execute(numbered).scalar_one() - len(ids) + 1
        statement = (
            update(rollouts)
            .where(rollouts.c.rollout_id == bindparam("b_id"))
            .values(
                # so that a late message finds another attempt number
                attempt=rollouts.c.attempt + 1,
                finish_seq=bindparam("b_seq"),
                **ended_unscored(State.FAILED, failure),
            )
        )
        connection.execute(statement, [{"b_id": each, "b_seq": first_seq + n} for n, each in enumerate(ids)])
        return len(ids)

    def _waiting(self, connection: Connection) -> list[str]:
        """Return its samples that are queued and have not begun this attempt; a sample between two stages has begun."""
        # waits for rows that a worker is just claiming; these are then not among the result
        lock_rollouts(connection, *self._members, rollouts.c.state == State.QUEUED.value)
        begun = select(attempts.c.attempt).where(
            attempts.c.rollout_id == rollouts.c.rollout_id, attempts.c.attempt == rollouts.c.attempt
        )
        statement = (
            select(rollouts.c.rollout_id)
            .where(*self._members, rollouts.c.state == State.QUEUED.value, ~begun.exists())
            .order_by(rollouts.c.sample_index)
        )
        return list(connection.execute(statement).scalars())

    def _failed(self, connection: Connection) -> list[tuple[str, str, Failure]]:
        """Return (rollout, node, failure) of each attempt whose failure the instance may have caused, in order.

        For a rollout that is scored again, only failures since the rescore.
        """
        statement = (
            select(
                attempts.c.rollout_id,
                attempts.c.node,
                attempts.c.result,
                attempts.c.error,
                # the last one may not be counted in any budget
                (rollouts.c.n_failures + case((rollouts.c.finish_seq.is_(None), 0), else_=1)).label("n_counted"),
            )
            .join(rollouts, rollouts.c.rollout_id == attempts.c.rollout_id)
            .where(*self._members, attempts.c.result.in_(sorted(SUSPECTS)))
            .order_by(attempts.c.finished_at)
        )
        newest, n_seen = [], Counter[str]()
        for row in reversed(connection.execute(statement).all()):
            n_seen[row.rollout_id] += 1
            if n_seen[row.rollout_id] <= row.n_counted:
                newest.append((row.rollout_id, row.node, Failure(row.result or "", row.error or "")))
        return newest[::-1]

    def _was_scored(self, connection: Connection) -> bool:
        members = select(rollouts.c.rollout_id).where(*self._members)
        return bool(connection.execute(select(exists().where(rewards.c.rollout_id.in_(members)))).scalar_one())

    def _name(self, connection: Connection) -> str:
        row = connection.execute(
            select(instances.c.data_source, instances.c.instance_id).where(
                instances.c.batch_id == self.batch_id, instances.c.group_index == self.group_index
            )
        ).one()
        of = f"{row.data_source} {row.instance_id}".strip()
        return f"instance {group_id(self.batch_id, self.group_index)} ({of})"
