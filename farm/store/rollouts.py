"""Every transition of a rollout, each one guarded UPDATE: claim, advance, finish, fail, requeue.

The functions take a connection inside a transaction and return whether they applied. A worker names its claim
(id, attempt, stage, owner); if the row no longer matches it, nothing happens. `attempt` rises whenever a rollout is
taken away from a worker, so a worker that was presumed dead writes nothing when it wakes up. A transition whose commit
was made but not answered is repeated: it finds its own result, and returns that it applied.

A score is never taken away; only another score can follow. So every end without a score, by a failure, a cancel or a
quarantine, writes the values of `ended_unscored`, which complete a rollout that was being scored again with its newest
score.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from sqlalchemy import (
    Column,
    Connection,
    Row,
    Select,
    Update,
    bindparam,
    case,
    insert,
    literal,
    select,
    update,
)

from farm.errors import EvaluatorError
from farm.records.rollout import Failure, Outcome, Stage, State
from farm.records.submission import RowRewards
from farm.store.sql.clock import db_now
from farm.store.sql.sanitize import fitting
from farm.store.sql.schema import AttemptRow, Batch, InstanceRow, RewardRow, RolloutRow

T = TypeVar("T")

rollouts = RolloutRow.__table__
batches = Batch.__table__
instances = InstanceRow.__table__
attempts = AttemptRow.__table__
rewards = RewardRow.__table__

NEXT_STAGE = {Stage.INIT: Stage.RUN, Stage.RUN: Stage.EVAL}
CHUNK = 400


def chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield the values in parts, so that a statement with a part of them has a bounded length."""
    return (values[start : start + CHUNK] for start in range(0, len(values), CHUNK))


# Transitions as one statement each, for Postgres: changes beyond the rollout's row are in CTEs. They are composed of
# the same guarded updates that other databases get one after the other, and return rows if they applied. Postgres runs
# one statement on one snapshot, and rechecks a row that it had to wait for.
def runs_together(connection: Connection) -> bool:
    """Return whether a database can run several changes in one statement."""
    return connection.dialect.name == "postgresql"


def claim_at_once(claim: Update, returned: Sequence[Column[Any]]) -> Select[Any]:
    """Return the statement that claims a stage and opens its attempt; its row has the columns `returned`."""
    of_attempt = {name: rollouts.c[name] for name in ("rollout_id", "attempt", "stage", "queued_at", "node")}
    of_attempt["worker"] = rollouts.c.owner
    claimed = claim.returning(*dict.fromkeys((*returned, *of_attempt.values()))).cte("claimed")
    values = [claimed.c[column.name] for column in of_attempt.values()]
    opened = insert(attempts).from_select([*of_attempt, "started_at"], select(*values, db_now())).cte("opened")
    return select(*(claimed.c[column.name] for column in returned)).add_cte(opened)


def advance_at_once(advance: Update, end_attempt: Update) -> Select[Any]:
    """Return the statement that advances a rollout and ends the attempt's stage; it has one row if it applied."""
    advanced = advance.returning(rollouts.c.rollout_id).cte("advanced")
    ended = end_attempt.where(select(advanced.c.rollout_id).exists()).cte("ended")
    return select(advanced.c.rollout_id).add_cte(ended)


def finish_at_once(finish: Update, end_attempt: Update) -> Select[Any]:
    """Return the statement that numbers and finishes a rollout, with its reward and the end of the attempt's stage.

    It has one row if it applied. It takes a number in any case, and locks the batch before the rollout.
    """
    numbered = (
        batches.update()
        .where(batches.c.batch_id == bindparam("b_batch"))
        .values(last_seq=batches.c.last_seq + 1)
        .returning(batches.c.last_seq)
        .cte("numbered")
    )
    finished = (
        finish.values(finish_seq=select(numbered.c.last_seq).scalar_subquery())
        .returning(rollouts.c.rollout_id, rollouts.c.attempt)
        .cte("finished")
    )
    of_score = ("value", "details", "rewards", "of_rows", "evaluator")
    score = [bindparam(f"b_{name}", type_=rewards.c[name].type) for name in of_score]
    rewarded = (
        insert(rewards)
        .from_select(
            ["rollout_id", "attempt", *of_score, "created_at"],
            select(finished.c.rollout_id, finished.c.attempt, *score, db_now()),
        )
        .cte("rewarded")
    )
    ended = end_attempt.where(select(finished.c.rollout_id).exists()).cte("ended")
    return select(finished.c.rollout_id).add_cte(rewarded, ended)


@dataclass(frozen=True, slots=True)
class Claim:
    """A stage of a rollout that one worker holds, until the stage ends or its lease expires."""

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


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The result of a completed run stage, without its calls and rows; as in `schema.RolloutRow`."""

    policy_outcome: str
    submission: dict[str, Any]
    n_turns: int = 0
    n_response_tokens: int = 0
    n_invalid_actions: int = 0
    n_mismatches: int = 0
    n_segments: int = 0
    version_min: int | None = None
    version_max: int | None = None


_claimed = tuple(
    rollouts.c[
        "batch_id", "group_index", "sample_index", "policy_outcome", "submission", "queued_at", "lease_expires_at"
    ]
)
# The statements of the hot path are built once: building one costs more than running it, and would happen under the
# write lock.
_hold = (
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
)
_claim = _hold.returning(*_claimed)
_claim_at_once = claim_at_once(_hold, _claimed)
_open_attempt = insert(attempts).values(started_at=db_now())


held_by_worker = (
    rollouts.c.rollout_id == bindparam("b_id"),
    rollouts.c.attempt == bindparam("b_attempt"),
    rollouts.c.stage == bindparam("b_stage"),
    rollouts.c.state == State.ACTIVE.value,
    rollouts.c.owner == bindparam("b_owner"),
)
_claim_again = (
    update(rollouts)
    .where(*held_by_worker, rollouts.c.lease_expires_at == bindparam("b_leased_until"))
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
    """Claim a queued stage. None if this node cannot claim it: messages may come late, twice or without reason.

    `tries` is the caller's list of the leases that it tried for this claim. If the answer to a commit was lost, it
    distinguishes this claim from one that another task, perhaps in the same process, made in between.
    """
    names = {"b_id": rollout_id, "b_attempt": attempt, "b_stage": stage.value, "b_node": node}
    names |= {"b_owner": owner, "b_lease": lease_s}
    together = runs_together(connection)
    row = connection.execute(_claim_at_once if together else _claim, names).one_or_none()
    if row is not None and not together:
        opened = {"rollout_id": rollout_id, "attempt": attempt, "stage": stage.value, "queued_at": row.queued_at}
        connection.execute(_open_attempt, opened | {"node": node, "worker": owner})
    if row is None:
        row = _made_before(connection, names, tries or ())
    if row is None:
        return None
    *values, _, leased_until = row
    if tries is not None:
        tries.append(leased_until)
    batch_id, group_index, sample_index, *outcome = values
    return Claim(rollout_id, attempt, stage, owner, batch_id, group_index, sample_index, node, *outcome)


def _made_before(connection: Connection, names: Mapping[str, Any], tries: Sequence[float]) -> Row[Any] | None:
    rows = (connection.execute(_claim_again, dict(names) | {"b_leased_until": lease}).one_or_none() for lease in tries)
    return next((row for row in rows if row is not None), None)


LEASE_CLEARED = {"owner": None, "lease_expires_at": None}
_advance = (
    update(rollouts)
    .where(*held_by_worker)
    .values(
        stage=bindparam("b_next"),
        state=State.QUEUED.value,
        queued_at=db_now(),
        resend_at=db_now() + bindparam("b_resend_after"),
        n_sends=1,
        **LEASE_CLEARED,
    )
)
_SUMMARY_FIELDS = tuple(field.name for field in fields(RunSummary))
_advance_with_summary = _advance.values({rollouts.c[name]: bindparam(f"b_{name}") for name in _SUMMARY_FIELDS})
_finish = (
    update(rollouts)
    .where(*held_by_worker)
    .values(
        state=State.COMPLETED.value,
        outcome=rollouts.c.policy_outcome,
        reward=bindparam("b_reward"),
        # earlier failures are in the attempts
        failure_kind=None,
        failure_message=None,
        finished_at=db_now(),
        **LEASE_CLEARED,
    )
)
_finish_as = _finish.values(finish_seq=bindparam("b_seq"))
newest_score = (
    select(rewards.c.value)
    .where(rewards.c.rollout_id == rollouts.c.rollout_id)
    .order_by(rewards.c.attempt.desc())
    .limit(1)
    .correlate(rollouts)
    .scalar_subquery()
)


def ended_unscored(state: State, failure: Failure | None = None) -> dict[str, Any]:
    """Return the values of a rollout that ends now without a new score: failed for a reason, or cancelled.

    A rollout that was being scored again is completed with its earlier score instead.
    """
    kind, message = (failure.kind, failure.message) if failure is not None else (None, None)
    # a literal of another column's type would skip the type that makes text fit for the database
    failure_message = literal(message, rollouts.c.failure_message.type)
    never_scored = newest_score.is_(None)
    return {
        "state": case((never_scored, state.value), else_=State.COMPLETED.value),
        "outcome": case((never_scored, kind or Outcome.CANCELLED.value), else_=rollouts.c.policy_outcome),
        "reward": newest_score,
        "failure_kind": case((never_scored, kind)),
        "failure_message": case((never_scored, failure_message)),
        "finished_at": db_now(),
        **LEASE_CLEARED,
    }


_add_reward = insert(rewards).values(created_at=db_now())
_number_one = (
    update(batches)
    .where(batches.c.batch_id == bindparam("b_batch"))
    .values(last_seq=batches.c.last_seq + 1)
    .returning(batches.c.last_seq)
)
attempt_ends = (
    update(attempts)
    .where(
        attempts.c.rollout_id == bindparam("b_id"),
        attempts.c.attempt == bindparam("b_attempt"),
        attempts.c.stage == bindparam("b_stage"),
        attempts.c.finished_at.is_(None),
    )
    .values(finished_at=db_now(), result=bindparam("b_result"), error=bindparam("b_error"))
)


_advance_at_once = advance_at_once(_advance, attempt_ends)
_advance_with_summary_at_once = advance_at_once(_advance_with_summary, attempt_ends)
_finish_at_once = finish_at_once(_finish, attempt_ends)


def lease_params(held: Claim) -> dict[str, Any]:
    return {"b_id": held.rollout_id, "b_attempt": held.attempt, "b_stage": held.stage.value, "b_owner": held.owner}


def _close_attempt(connection: Connection, rollout_id: str, attempt: int, stage: str, result: str, error: str) -> None:
    values = {"b_id": rollout_id, "b_attempt": attempt, "b_stage": stage}
    connection.execute(attempt_ends, values | {"b_result": result, "b_error": error or None})


def _ended_before(connection: Connection, held: Claim, result: str) -> bool:
    """Return whether this claim already ended with this result: the write was committed, and its answer was lost."""
    key = {"rollout_id": held.rollout_id, "attempt": held.attempt, "stage": held.stage.value, "worker": held.owner}
    return connection.execute(select(attempts.c.result).filter_by(**key)).scalar() == result


def advance(connection: Connection, held: Claim, resend_after_s: float, summary: RunSummary | None = None) -> bool:
    """Queue the next stage; False if the claim is gone. `summary` is the result of the run stage."""
    names = lease_params(held) | {"b_next": NEXT_STAGE[held.stage].value, "b_resend_after": resend_after_s}
    if summary is not None:
        names |= {f"b_{name}": getattr(summary, name) for name in _SUMMARY_FIELDS}
    if runs_together(connection):
        statement = _advance_at_once if summary is None else _advance_with_summary_at_once
        applied = connection.execute(statement, names | {"b_result": "advanced", "b_error": None}).first() is not None
        return applied or _ended_before(connection, held, "advanced")
    if connection.execute(_advance if summary is None else _advance_with_summary, names).rowcount != 1:
        return _ended_before(connection, held, "advanced")
    _close_attempt(connection, held.rollout_id, held.attempt, held.stage.value, "advanced", "")
    return True


def finish(
    connection: Connection,
    held: Claim,
    value: float,
    details: dict[str, Any],
    evaluator: str,
    named: Mapping[str, float] | None = None,
    of_rows: RowRewards | None = None,
) -> bool:
    """Complete a rollout with its reward, `value`; `named` are all its rewards, `of_rows` those of single rows.

    False if the claim is gone.

    Raises EvaluatorError for details that no database can store.
    """
    names = lease_params(held) | {"b_reward": value}
    score: dict[str, Any] = {"value": value, "details": details, "evaluator": evaluator, "rewards": dict(named or {})}
    score["of_rows"] = of_rows and of_rows.model_dump(mode="json")
    with fitting(EvaluatorError, f"{held.rollout_id}: the score of {evaluator}"):
        if runs_together(connection):
            names |= {"b_batch": held.batch_id, "b_result": "completed", "b_error": None}
            names |= {f"b_{name}": each for name, each in score.items()}
            applied = connection.execute(_finish_at_once, names).first() is not None
        else:
            applied = _finish_one_by_one(connection, held, names, score)
    if not applied:
        _give_seq_back(connection, held.batch_id)
        return _ended_before(connection, held, "completed")
    return True


def _finish_one_by_one(connection: Connection, held: Claim, names: Mapping[str, Any], score: Mapping[str, Any]) -> bool:
    seq = _next_seq(connection, held.batch_id)
    if connection.execute(_finish_as, {**names, "b_seq": seq}).rowcount != 1:
        return False
    connection.execute(_add_reward, {"rollout_id": held.rollout_id, "attempt": held.attempt, **score})
    _close_attempt(connection, held.rollout_id, held.attempt, held.stage.value, "completed", "")
    return True


def _next_seq(connection: Connection, batch_id: str) -> int:
    """Return the next end number of a batch. Its row is locked, so numbers are in the order of commits."""
    return int(connection.execute(_number_one, {"b_batch": batch_id}).scalar_one())


def _give_seq_back(connection: Connection, batch_id: str) -> None:
    """Undo `_next_seq` in the same transaction: the row is still locked, so nobody has seen the number."""
    connection.execute(update(batches).where(batches.c.batch_id == batch_id).values(last_seq=batches.c.last_seq - 1))


def fail(
    connection: Connection, held: Claim, failure: Failure, values: Mapping[str, Any], cause: Failure | None = None
) -> bool:
    """End a rollout as failed; one that was being scored again keeps its score. False if the claim is gone.

    `cause` is the failure of its last attempt, if `failure` is a more general one.
    """
    seq = _next_seq(connection, held.batch_id)
    end = ended_unscored(State.FAILED, failure) | {"finish_seq": seq}
    statement = update(rollouts).where(*held_by_worker).values(**(end | dict(values)))
    if connection.execute(statement, lease_params(held)).rowcount != 1:
        _give_seq_back(connection, held.batch_id)
        return False
    ended_by = cause or failure
    _close_attempt(connection, held.rollout_id, held.attempt, held.stage.value, ended_by.kind, ended_by.message)
    return True


def requeue(connection: Connection, held: Claim, failure: Failure, values: Mapping[str, Any]) -> bool:
    """Queue a rollout for another attempt, on any node. After the run stage only the scoring starts over."""
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
        **LEASE_CLEARED,
    }
    statement = update(rollouts).where(*held_by_worker).values(**(back | dict(values)))
    if connection.execute(statement, lease_params(held)).rowcount != 1:
        return False
    _close_attempt(connection, held.rollout_id, held.attempt, held.stage.value, failure.kind, failure.message)
    return True
