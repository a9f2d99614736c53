"""Every transition of a rollout, each one guarded UPDATE: claim, advance, finish, fail, requeue.

The functions take a connection inside a transaction and say whether they applied. A worker names what it believes it
holds (id, attempt, stage, owner); if the row no longer says so, nothing happens. `attempt` rises whenever a rollout is
taken away from somebody, so a worker that was presumed dead writes nothing when it wakes up. A transition whose commit
was made, but not answered, is asked for again: it finds itself made, and says that it applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import Connection, CursorResult, Row, Table, bindparam, insert, select, update

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


_claimed = (
    rollouts.c.batch_id,
    rollouts.c.group_index,
    rollouts.c.sample_index,
    rollouts.c.policy_outcome,
    rollouts.c.submission,
    rollouts.c.queued_at,
    rollouts.c.lease_expires_at,
)
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
    .returning(*_claimed)
)
_open_attempt = insert(attempts).values(started_at=db_now())


_claim_again = (
    update(rollouts)
    .where(
        rollouts.c.rollout_id == bindparam("b_id"),
        rollouts.c.attempt == bindparam("b_attempt"),
        rollouts.c.stage == bindparam("b_stage"),
        rollouts.c.state == State.ACTIVE.value,
        rollouts.c.owner == bindparam("b_owner"),
        rollouts.c.lease_expires_at == bindparam("b_leased_until"),
    )
    .values(lease_expires_at=db_now() + bindparam("b_lease"))
    .returning(*_claimed)
)


def claim(
    connection: Connection,
    rollout_id: str,
    attempt: int,
    stage: Stage,
    node: str,
    owner: str,
    lease_s: float,
    tries: list[float] | None = None,
) -> Claim | None:
    """Take a queued stage. None if it is not this node's to take: a ring may come late, twice or for nothing.

    `tries` is the caller's memory of the leases that this claim was given so far. If the answer to a commit was lost,
    it tells a claim that was made from one that somebody else, perhaps in the same process, made meanwhile.
    """
    names = {"b_id": rollout_id, "b_attempt": attempt, "b_stage": stage.value, "b_node": node}
    names |= {"b_owner": owner, "b_lease": lease_s}
    row = connection.execute(_claim, names).one_or_none()
    if row is not None:
        *values, queued_at, leased_until = row
        opened = {"rollout_id": rollout_id, "attempt": attempt, "stage": stage.value, "queued_at": queued_at}
        connection.execute(_open_attempt, opened | {"node": node, "worker": owner})
    else:
        row = _made_before(connection, names, tries or ())
        if row is None:
            return None
        *values, _, leased_until = row
    if tries is not None:
        tries.append(leased_until)
    batch_id, group_index, sample_index, policy_outcome, submission = values
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
    )


def _made_before(connection: Connection, names: Mapping[str, Any], tries: Sequence[float]) -> Row[Any] | None:
    found = (connection.execute(_claim_again, dict(names) | {"b_leased_until": lease}).one_or_none() for lease in tries)
    return next((row for row in found if row is not None), None)


mine = (
    rollouts.c.rollout_id == bindparam("b_id"),
    rollouts.c.attempt == bindparam("b_attempt"),
    rollouts.c.stage == bindparam("b_stage"),
    rollouts.c.state == State.ACTIVE.value,
    rollouts.c.owner == bindparam("b_owner"),
)
released = {"owner": None, "lease_expires_at": None}
_advance = (
    update(rollouts)
    .where(*mine)
    .values(
        stage=bindparam("b_next"),
        state=State.QUEUED.value,
        queued_at=db_now(),
        ring_at=db_now() + bindparam("b_ring_again"),
        n_rings=1,
        **released,
    )
)
_PLAYED = (
    "policy_outcome",
    "submission",
    "n_turns",
    "n_response_tokens",
    "n_invalid_actions",
    "n_mismatches",
    "n_segments",
    "version_min",
    "version_max",
)
_UNCOUNTED: dict[str, Any] = {
    "n_invalid_actions": 0,
    "n_mismatches": 0,
    "n_segments": 0,
    "version_min": None,
    "version_max": None,
}
_advance_played = _advance.values({rollouts.c[name]: bindparam(f"b_{name}") for name in _PLAYED})
_finish = (
    update(rollouts)
    .where(*mine)
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


def names_of(held: Claim) -> dict[str, Any]:
    return {"b_id": held.rollout_id, "b_attempt": held.attempt, "b_stage": held.stage.value, "b_owner": held.owner}


def _applied(result: CursorResult[Any]) -> bool:
    return result.rowcount == 1


def _close_attempt(connection: Connection, rollout_id: str, attempt: int, stage: str, result: str, error: str) -> None:
    values = {"b_id": rollout_id, "b_attempt": attempt, "b_stage": stage}
    connection.execute(_end_attempt, values | {"b_result": result, "b_error": error or None})


def _ended_before(connection: Connection, held: Claim, result: str) -> bool:
    """Whether this very claim was ended so already: the write was made, and only the answer to its commit was lost."""
    key = {"rollout_id": held.rollout_id, "attempt": held.attempt, "stage": held.stage.value, "worker": held.owner}
    return connection.execute(select(attempts.c.result).filter_by(**key)).scalar() == result


def advance(connection: Connection, held: Claim, ring_again_s: float, played: Mapping[str, Any] | None = None) -> bool:
    """Queue the next stage; False if the claim is gone.

    `played` is what the run stage found out: policy_outcome, submission and the counts of `tables.RolloutRow`; those
    that are missing are 0, or unknown.
    """
    names = names_of(held) | {"b_next": NEXT_STAGE[held.stage].value, "b_ring_again": ring_again_s}
    if played is None:
        result = connection.execute(_advance, names)
    else:
        found = _UNCOUNTED | dict(played)
        result = connection.execute(_advance_played, names | {f"b_{name}": found[name] for name in _PLAYED})
    if not _applied(result):
        return _ended_before(connection, held, "advanced")
    _close_attempt(connection, held.rollout_id, held.attempt, held.stage.value, "advanced", "")
    return True


def finish(connection: Connection, held: Claim, value: float, details: dict[str, Any], evaluator: str) -> bool:
    """End a rollout as completed with its reward. False if the claim is gone."""
    names = names_of(held) | {"b_reward": value, "b_seq": _next_seq(connection, held.batch_id)}
    if not _applied(connection.execute(_finish, names)):
        _give_seq_back(connection, held.batch_id)
        return _ended_before(connection, held, "completed")
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


def fail(
    connection: Connection, held: Claim, failure: Failure, values: Mapping[str, Any], cause: Failure | None = None
) -> bool:
    """End a rollout as failed, without a reward, whatever was scored before. False if the claim is gone.

    `cause` is what ended its last attempt, if the failure says more than that.
    """
    seq = _next_seq(connection, held.batch_id)
    end: dict[str, Any] = {
        "state": State.FAILED.value,
        "outcome": failure.kind,
        "reward": None,
        "failure_kind": failure.kind,
        "failure_message": failure.message,
        "finished_at": db_now(),
        "finish_seq": seq,
        **released,
    }
    statement = update(rollouts).where(*mine).values(**(end | dict(values)))
    if not _applied(connection.execute(statement, names_of(held))):
        _give_seq_back(connection, held.batch_id)
        return False
    ended_by = cause or failure
    _close_attempt(connection, held.rollout_id, held.attempt, held.stage.value, ended_by.kind, ended_by.message)
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
    statement = update(rollouts).where(*mine).values(**(back | dict(values)))
    if not _applied(connection.execute(statement, names_of(held))):
        return False
    _close_attempt(connection, held.rollout_id, held.attempt, held.stage.value, failure.kind, failure.message)
    return True
