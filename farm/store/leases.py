"""Leases on rollouts: how a worker keeps what it plays, hears what was taken from it, and is presumed dead."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import Connection, bindparam, select, update

from farm.rollout import Stage, State
from farm.store.clock import db_now
from farm.store.rollouts import CHUNK, Claim, mine, names_of, rollouts

_ENDED = 0.0
"""As a lease: of a worker that is known to be dead."""
_held = (rollouts.c.finish_seq.is_(None), rollouts.c.node.is_not(None), rollouts.c.state == State.ACTIVE.value)


def renew(connection: Connection, owner: str, held: Collection[str], lease_s: float) -> set[str]:
    """Renew the leases of an owner on these rollouts. Returns those it still holds; the others it has lost."""
    kept: set[str] = set()
    ids = sorted(held)
    for start in range(0, len(ids), CHUNK):
        statement = (
            update(rollouts)
            .where(
                rollouts.c.rollout_id.in_(ids[start : start + CHUNK]),
                rollouts.c.owner == owner,
                rollouts.c.state == State.ACTIVE.value,
            )
            .values(lease_expires_at=db_now() + lease_s)
            .returning(rollouts.c.rollout_id)
        )
        kept.update(connection.execute(statement).scalars())
    return kept


_kept = select(rollouts.c.rollout_id).where(
    # as the index of live rollouts words it; a list of all that is held would cost Postgres ten times as much
    rollouts.c.finish_seq.is_(None),
    rollouts.c.node == bindparam("b_node"),
    rollouts.c.owner == bindparam("b_owner"),
    rollouts.c.state == State.ACTIVE.value,
)


def taken(connection: Connection, owner: str, node: str, held: Collection[str]) -> dict[str, State]:
    """Those of these rollouts that an owner on a node does not hold, and in which state they are."""
    found: dict[str, State] = {}
    ids = sorted(set(held).difference(connection.execute(_kept, {"b_node": node, "b_owner": owner}).scalars()))
    for start in range(0, len(ids), CHUNK):
        statement = select(rollouts.c.rollout_id, rollouts.c.state).where(
            rollouts.c.rollout_id.in_(ids[start : start + CHUNK]),
            rollouts.c.owner.is_distinct_from(owner) | (rollouts.c.state != State.ACTIVE.value),
        )
        found.update({rollout_id: State(state) for rollout_id, state in connection.execute(statement).tuples()})
    return found


def expired(connection: Connection, limit: int, known_dead: bool = False) -> Sequence[Claim]:
    """Claims whose lease has run out; or only those of workers that are `known_dead`."""
    columns = (
        rollouts.c.rollout_id,
        rollouts.c.attempt,
        rollouts.c.stage,
        rollouts.c.owner,
        rollouts.c.batch_id,
        rollouts.c.group_index,
        rollouts.c.sample_index,
        rollouts.c.node,
    )
    statement = (
        select(*columns).where(*_held, rollouts.c.lease_expires_at <= (_ENDED if known_dead else db_now())).limit(limit)
    )
    return [
        Claim(
            row.rollout_id,
            row.attempt,
            Stage(row.stage),
            row.owner,
            row.batch_id,
            row.group_index,
            row.sample_index,
            row.node,
            None,
            None,
        )
        for row in connection.execute(statement)
    ]


def is_expired(connection: Connection, held: Claim) -> bool:
    """Whether the lease of a claim is still run out: its worker may have been slow, not dead."""
    late = select(rollouts.c.rollout_id).where(*mine, rollouts.c.lease_expires_at <= db_now())
    return connection.execute(late, names_of(held)).first() is not None


def expire_owner(connection: Connection, owner: str) -> int:
    """Let the leases of a worker that is known to be dead run out now. Returns how many it held."""
    statement = update(rollouts).where(*_held, rollouts.c.owner == owner).values(lease_expires_at=_ENDED)
    return connection.execute(statement).rowcount
