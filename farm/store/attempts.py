"""Closing of failed or lost attempts: retry, give up, or quarantine the instance.

Workers and the dispatcher close attempts only here, with the retry decision for each cause. Budgets are read in the
same transaction, so no decision uses outdated numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select, update

from farm.records.rollout import Failure
from farm.retry_policy import Budget, RetryDecision, is_left, pause_s
from farm.store import rollouts as transitions
from farm.store.quarantine import QuarantineGroup
from farm.store.rollouts import Claim, batches, rollouts
from farm.store.sql.clock import db_now

_SPENT: Mapping[Budget, tuple[str, str, str]] = {
    Budget.FAILURES: ("n_failures", "max_attempts", "no attempt of {most} is left"),
    Budget.LOSSES: ("n_lost", "max_losses", "it was lost {n} times, and its batch allows {most}"),
    Budget.RESTARTS: ("n_restarts", "max_attempts", "it was restarted {most} times, which is the limit"),
}
"""For each budget: its counter, its limit, and the message when it is used up."""


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
    again, counted, spent = _counted(budgets, decision.budget)
    if suspicion is None and again:
        n = counted.get(_counter(decision.budget), 0)
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
            rollouts.c.n_failures,
            rollouts.c.n_lost,
            rollouts.c.n_restarts,
            batches.c.max_attempts,
            batches.c.max_losses,
            batches.c.quarantine_after,
        )
        .join(batches, batches.c.batch_id == rollouts.c.batch_id)
        .where(rollouts.c.rollout_id == held.rollout_id, rollouts.c.attempt == held.attempt)
    )
    row = connection.execute(statement).one_or_none()
    return None if row is None else row._asdict()


def _counter(budget: Budget) -> str:
    return _SPENT[budget][0] if budget in _SPENT else ""


def _counted(budgets: Mapping[str, int], budget: Budget) -> tuple[bool, dict[str, Any], str]:
    """Return whether another attempt is left, the counter with this one, and the reason if none is left."""
    if budget not in _SPENT:
        return is_left(budget, 0, 0), {}, ""
    counter, bound, words = _SPENT[budget]
    n, most = budgets[counter] + 1, budgets[bound]
    again = is_left(budget, n, most)
    return again, {counter: n}, "" if again or most == 1 else words.format(n=n, most=most)
