"""Leases on rollouts: renewal by workers, detection of lost claims, expiry of dead workers' leases."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from sqlalchemy import ColumnElement, Connection, bindparam, select, update

from farm.records.rollout import Stage, State
from farm.store.locks import lock_rollouts
from farm.store.rollouts import Claim, chunks, held_by_worker, lease_params, rollouts
from farm.store.sql.clock import db_now, due

_ENDED = 0.0
"""The lease end of a worker that is known to be dead."""
_held = (rollouts.c.finish_seq.is_(None), rollouts.c.node.is_not(None), rollouts.c.state == State.ACTIVE.value)


def renew(connection: Connection, owner: str, held: Collection[str], lease_s: float) -> set[str]:
    """Renew the leases of an owner on these rollouts. Returns those it still holds; the others are lost.

    It waits for no lock: a row that another transaction holds is renewed the next time.
    """
    kept: set[str] = set()
    for some in chunks(sorted(held)):
        own = select(rollouts.c.rollout_id).where(
            rollouts.c.rollout_id.in_(some), rollouts.c.owner == owner, rollouts.c.state == State.ACTIVE.value
        )
        statement = (
            update(rollouts)
            .where(rollouts.c.rollout_id.in_(own.with_for_update(skip_locked=True, key_share=True)))
            .values(lease_expires_at=db_now() + lease_s)
            .returning(rollouts.c.rollout_id)
        )
        renewed = set(connection.execute(statement).scalars())
        kept |= renewed
        if len(renewed) < len(some):
            kept.update(connection.execute(own).scalars())
    return kept


_kept = select(rollouts.c.rollout_id).where(
    # worded as the index of live rollouts; a list of all held ids would cost Postgres ten times as much
    rollouts.c.finish_seq.is_(None),
    rollouts.c.node == bindparam("b_node"),
    rollouts.c.owner == bindparam("b_owner"),
    rollouts.c.state == State.ACTIVE.value,
)


def taken(connection: Connection, owner: str, node: str, held: Collection[str]) -> dict[str, State]:
    """Return the states of those rollouts in `held` that an owner on a node no longer holds."""
    states: dict[str, State] = {}
    ids = sorted(set(held).difference(connection.execute(_kept, {"b_node": node, "b_owner": owner}).scalars()))
    for some in chunks(ids):
        statement = select(rollouts.c.rollout_id, rollouts.c.state).where(
            rollouts.c.rollout_id.in_(some),
            rollouts.c.owner.is_distinct_from(owner) | (rollouts.c.state != State.ACTIVE.value),
        )
        states.update({rollout_id: State(state) for rollout_id, state in connection.execute(statement).tuples()})
    return states


def expired(
    connection: Connection, limit: int, known_dead: bool = False, now: float | None = None, longest_s: float = math.inf
) -> Sequence[Claim]:
    """Return claims whose lease has expired at `now`, or only those of workers that are `known_dead`.

    `longest_s` is the longest lease that is ever given. A lease that ends later was given before the clock jumped back
    and was not renewed since, so it counts as expired.
    """
    names = ("rollout_id", "attempt", "owner", "batch_id", "group_index", "sample_index", "node")
    over = rollouts.c.lease_expires_at <= _ENDED if known_dead else _over(now, longest_s)
    statement = select(*(rollouts.c[name] for name in (*names, "stage"))).where(*_held, over).limit(limit)
    return [
        Claim(
            **{name: getattr(row, name) for name in names},
            stage=Stage(row.stage),
            policy_outcome=None,
            submission=None,
        )
        for row in connection.execute(statement)
    ]


def _over(now: float | None, longest_s: float) -> ColumnElement[bool]:
    if math.isinf(longest_s):
        return rollouts.c.lease_expires_at <= (db_now() if now is None else now)
    return due(rollouts.c.lease_expires_at, longest_s, now)


def is_expired(connection: Connection, held: Claim, now: float | None = None, longest_s: float = math.inf) -> bool:
    """Return whether the lease of a claim is still expired: its worker may have been slow, not dead."""
    expired = select(rollouts.c.rollout_id).where(*held_by_worker, _over(now, longest_s))
    return connection.execute(expired, lease_params(held)).first() is not None


def expire_owner(connection: Connection, owner: str) -> int:
    """Expire the leases of a worker that is known to be dead. Returns how many it held."""
    lock_rollouts(connection, *_held, rollouts.c.owner == owner)
    statement = update(rollouts).where(*_held, rollouts.c.owner == owner).values(lease_expires_at=_ENDED)
    return connection.execute(statement).rowcount
