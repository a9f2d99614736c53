"""Every transition of a rollout, each one guarded UPDATE: claim, renew, advance, finish, fail, requeue.

The functions take a connection inside a transaction and say whether they applied. A worker names what it believes it
holds (id, attempt, stage, owner); if the row no longer says so, nothing happens. `attempt` rises whenever a rollout is
taken away from somebody, so a worker that was presumed dead writes nothing when it wakes up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import Connection, CursorResult, Table, bindparam, insert, select, update

from farm.rollout import Failure, Stage, State
from farm.store.clock import db_now
from farm.store.tables import AttemptRow, Batch, RewardRow, RolloutRow

rollouts = cast(Table, RolloutRow.__table__)
batches = cast(Table, Batch.__table__)
attempts = cast(Table, AttemptRow.__table__)
rewards = cast(Table, RewardRow.__table__)

NEXT_STAGE = {Stage.INIT: Stage.RUN, Stage.RUN: Stage.EVAL}
CHUNK = 400


@dataclass(frozen=True, slots=True)
class Claim:
    """A stage of a rollout that one worker holds, until it advances or finishes it or its lease runs out."""

    rollout_id: str
    attempt: int
    stage: Stage
    owner: str
    batch_id: str
    group_index: int
    sample_index: int
    node: str
    policy_outcome: str | None
    submission: dict[str, Any] | None
    n_failures: int


# The statements of the hot path are built once: building one costs more than running it, and it would happen while the
# write lock is held.
_claim = (
    update(rollouts)
    .where(
        rollouts.c.rollout_id == bindparam("b_id"),
        rollouts.c.attempt == bindparam("b_attempt"),
        rollouts.c.stage == bindparam("b_stage"),
        rollouts.c.state == State.QUEUED.value,
        rollouts.c.node == bindparam("b_node"),
    )
    .values(
        state=State.ACTIVE.value,
        owner=bindparam("b_owner"),
        lease_expires_at=db_now() + bindparam("b_lease"),
    )
    .returning(
        rollouts.c.batch_id,
        rollouts.c.group_index,
        rollouts.c.sample_index,
        rollouts.c.policy_outcome,
        rollouts.c.submission,
        rollouts.c.n_failures,
        rollouts.c.queued_at,
    )
)
_open_attempt = insert(attempts).values(started_at=db_now())


def claim(
    connection: Connection, rollout_id: str, attempt: int, stage: Stage, node: str, owner: str, lease_s: float
) -> Claim | None:
    """Take a queued stage. None if it is not this node's to take: a ring may come late, twice or for nothing."""
    names = {"b_id": rollout_id, "b_attempt": attempt, "b_stage": stage.value, "b_node": node}
    row = connection.execute(_claim, names | {"b_owner": owner, "b_lease": lease_s}).one_or_none()
    if row is None:
        return None
    *values, queued_at = row
    opened = {"rollout_id": rollout_id, "attempt": attempt, "stage": stage.value, "queued_at": queued_at}
    connection.execute(_open_attempt, opened | {"node": node, "worker": owner})
    batch_id, group_index, sample_index, policy_outcome, submission, n_failures = values
    return Claim(
        rollout_id,
        attempt,
        stage,
        owner,
        batch_id,
        group_index,
        sample_index,
        node,
        policy_outcome,
        submission,
        n_failures,
    )


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


_mine = (
    rollouts.c.rollout_id == bindparam("b_id"),
    rollouts.c.attempt == bindparam("b_attempt"),
    rollouts.c.stage == bindparam("b_stage"),
    rollouts.c.state == State.ACTIVE.value,
    rollouts.c.owner == bindparam("b_owner"),
)
released = {"owner": None, "lease_expires_at": None}
_advance = (
    update(rollouts)
    .where(*_mine)
    .values(
        stage=bindparam("b_next"),
        state=State.QUEUED.value,
        queued_at=db_now(),
        ring_at=db_now() + bindparam("b_ring_again"),
        n_rings=1,
        **released,
    )
)
_PLAYED = ("policy_outcome", "submission", "n_turns", "n_response_tokens")
_advance_played = _advance.values({rollouts.c[name]: bindparam(f"b_{name}") for name in _PLAYED})
_finish = (
    update(rollouts)
    .where(*_mine)
    .values(
        state=State.COMPLETED.value,
        outcome=rollouts.c.policy_outcome,
        reward=bindparam("b_reward"),
        # what went wrong on the way is in the attempts
        failure_kind=None,
        failure_message=None,
        finished_at=db_now(),
        finish_seq=bindparam("b_seq"),
        **released,
    )
)
_add_reward = insert(rewards).values(created_at=db_now())
_number_one = (
    update(batches)
    .where(batches.c.batch_id == bindparam("b_batch"))
    .values(last_seq=batches.c.last_seq + 1)
    .returning(batches.c.last_seq)
)
_end_attempt = (
    update(attempts)
    .where(
        attempts.c.rollout_id == bindparam("b_id"),
        attempts.c.attempt == bindparam("b_attempt"),
        attempts.c.stage == bindparam("b_stage"),
        attempts.c.finished_at.is_(None),
    )
    .values(finished_at=db_now(), result=bindparam("b_result"), error=bindparam("b_error"))
)


def _names(held: Claim) -> dict[str, Any]:
    return {"b_id": held.rollout_id, "b_attempt": held.attempt, "b_stage": held.stage.value, "b_owner": held.owner}


def _applied(result: CursorResult[Any]) -> bool:
    return result.rowcount == 1


def _close_attempt(connection: Connection, rollout_id: str, attempt: int, stage: str, result: str, error: str) -> None:
    values = {"b_id": rollout_id, "b_attempt": attempt, "b_stage": stage}
    connection.execute(_end_attempt, values | {"b_result": result, "b_error": error or None})


def advance(connection: Connection, held: Claim, ring_again_s: float, played: Mapping[str, Any] | None = None) -> bool:
    """Queue the next stage; False if the claim is gone.

    `played` is what the run stage found out: policy_outcome, submission, n_turns and n_response_tokens.
    """
    names = _names(held) | {"b_next": NEXT_STAGE[held.stage].value, "b_ring_again": ring_again_s}
    if played is None:
        result = connection.execute(_advance, names)
    else:
        result = connection.execute(_advance_played, names | {f"b_{name}": played[name] for name in _PLAYED})
    if not _applied(result):
        return False
    _close_attempt(connection, held.rollout_id, held.attempt, held.stage.value, "advanced", "")
    return True


def finish(connection: Connection, held: Claim, value: float, details: dict[str, Any], evaluator: str) -> bool:
    """End a rollout as completed with its reward. False if the claim is gone."""
    names = _names(held) | {"b_reward": value, "b_seq": _next_seq(connection, held.batch_id)}
    if not _applied(connection.execute(_finish, names)):
        _give_seq_back(connection, held.batch_id)
        return False
    score = {"rollout_id": held.rollout_id, "attempt": held.attempt, "value": value, "details": details}
    connection.execute(_add_reward, score | {"evaluator": evaluator})
    _close_attempt(connection, held.rollout_id, held.attempt, held.stage.value, "completed", "")
    return True


def _next_seq(connection: Connection, batch_id: str) -> int:
    """The number of the rollout that ends next. The row's lock makes the order of numbers that of commits."""
    return int(connection.execute(_number_one, {"b_batch": batch_id}).scalar_one())


def _give_seq_back(connection: Connection, batch_id: str) -> None:
    """Undo `_next_seq` in the same transaction: the row is still locked, so nobody has seen the number."""
    connection.execute(update(batches).where(batches.c.batch_id == batch_id).values(last_seq=batches.c.last_seq - 1))


def fail(connection: Connection, held: Claim, failure: Failure, retry_in_s: float | None) -> bool:
    """End an attempt that broke: queued again after `retry_in_s`, or failed for good if that is None."""
    if retry_in_s is not None:
        values = {"n_failures": rollouts.c.n_failures + 1, "ready_at": db_now() + retry_in_s}
        return requeue(connection, held, failure, values)
    seq = _next_seq(connection, held.batch_id)
    statement = (
        update(rollouts)
        .where(*_mine)
        .values(
            state=State.FAILED.value,
            outcome=failure.kind,
            reward=None,
            failure_kind=failure.kind,
            failure_message=failure.message,
            n_failures=rollouts.c.n_failures + 1,
            finished_at=db_now(),
            finish_seq=seq,
            **released,
        )
    )
    if not _applied(connection.execute(statement, _names(held))):
        _give_seq_back(connection, held.batch_id)
        return False
    _close_attempt(connection, held.rollout_id, held.attempt, held.stage.value, "failed", failure.message)
    return True


def requeue(connection: Connection, held: Claim, failure: Failure, values: Mapping[str, Any]) -> bool:
    """Give a rollout back for another attempt, on any node. After the run stage only the scoring starts over."""
    stage = Stage.EVAL if held.stage is Stage.EVAL else Stage.INIT
    back: dict[str, Any] = {
        "stage": stage.value,
        "state": State.QUEUED.value,
        "attempt": rollouts.c.attempt + 1,
        "node": None,
        "queued_at": db_now(),
        "ready_at": db_now(),
        "failure_kind": failure.kind,
        "failure_message": failure.message,
        **released,
    }
    statement = update(rollouts).where(*_mine).values(**(back | dict(values)))
    if not _applied(connection.execute(statement, _names(held))):
        return False
    _close_attempt(connection, held.rollout_id, held.attempt, held.stage.value, failure.kind, failure.message)
    return True


_held = (rollouts.c.finish_seq.is_(None), rollouts.c.node.is_not(None), rollouts.c.state == State.ACTIVE.value)


def expired(connection: Connection, limit: int) -> Sequence[tuple[Claim, int]]:
    """Claims whose lease has run out, with the batch's max_attempts."""
    columns = (
        rollouts.c.rollout_id,
        rollouts.c.attempt,
        rollouts.c.stage,
        rollouts.c.owner,
        rollouts.c.batch_id,
        rollouts.c.group_index,
        rollouts.c.sample_index,
        rollouts.c.node,
        rollouts.c.n_failures,
        batches.c.max_attempts,
    )
    statement = (
        select(*columns)
        .join(batches, batches.c.batch_id == rollouts.c.batch_id)
        .where(*_held, rollouts.c.lease_expires_at < db_now())
        .limit(limit)
    )
    return [
        (
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
                row.n_failures,
            ),
            row.max_attempts,
        )
        for row in connection.execute(statement)
    ]


def expire_owner(connection: Connection, owner: str) -> int:
    """Let the leases of a worker that is known to be dead run out now. Returns how many it held."""
    statement = update(rollouts).where(*_held, rollouts.c.owner == owner).values(lease_expires_at=0.0)
    return connection.execute(statement).rowcount
