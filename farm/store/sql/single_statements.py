"""Transitions as one statement each, for Postgres: changes beyond the rollout's row are in CTEs.

They are composed of the same guarded updates that other databases get one after the other, and return rows if they
applied. Postgres runs one statement on one snapshot, and rechecks a row that it had to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from sqlalchemy import Column, Connection, Select, Table, Update, bindparam, insert, select

from farm.store.sql.clock import db_now
from farm.store.sql.schema import AttemptRow, Batch, RewardRow, RolloutRow

_rollouts = cast(Table, RolloutRow.__table__)
_batches = cast(Table, Batch.__table__)
_attempts = cast(Table, AttemptRow.__table__)
_rewards = cast(Table, RewardRow.__table__)


def runs_together(connection: Connection) -> bool:
    """Return whether a database can run several changes in one statement."""
    return connection.dialect.name == "postgresql"


def claim_at_once(claim: Update, returned: Sequence[Column[Any]]) -> Select[Any]:
    """Return the statement that claims a stage and opens its attempt; its row has the columns `returned`."""
    of_attempt = {
        "rollout_id": _rollouts.c.rollout_id,
        "attempt": _rollouts.c.attempt,
        "stage": _rollouts.c.stage,
        "queued_at": _rollouts.c.queued_at,
        "node": _rollouts.c.node,
        "worker": _rollouts.c.owner,
    }
    claimed = claim.returning(*dict.fromkeys((*returned, *of_attempt.values()))).cte("claimed")
    values = [claimed.c[column.name] for column in of_attempt.values()]
    opened = insert(_attempts).from_select([*of_attempt, "started_at"], select(*values, db_now())).cte("opened")
    return select(*(claimed.c[column.name] for column in returned)).add_cte(opened)


def advance_at_once(advance: Update, end_attempt: Update) -> Select[Any]:
    """Return the statement that advances a rollout and ends the attempt's stage; it has one row if it applied."""
    advanced = advance.returning(_rollouts.c.rollout_id).cte("advanced")
    ended = end_attempt.where(select(advanced.c.rollout_id).exists()).cte("ended")
    return select(advanced.c.rollout_id).add_cte(ended)


def finish_at_once(finish: Update, end_attempt: Update) -> Select[Any]:
    """Return the statement that numbers and finishes a rollout, with its reward and the end of the attempt's stage.

    It has one row if it applied. It takes a number in any case, and locks the batch before the rollout.
    """
    numbered = (
        _batches.update()
        .where(_batches.c.batch_id == bindparam("b_batch"))
        .values(last_seq=_batches.c.last_seq + 1)
        .returning(_batches.c.last_seq)
        .cte("numbered")
    )
    finished = (
        finish.values(finish_seq=select(numbered.c.last_seq).scalar_subquery())
        .returning(_rollouts.c.rollout_id, _rollouts.c.attempt)
        .cte("finished")
    )
    of_score = ("value", "details", "rewards", "of_rows", "evaluator")
    score = [bindparam(f"b_{name}", type_=_rewards.c[name].type) for name in of_score]
    rewarded = (
        insert(_rewards)
        .from_select(
            ["rollout_id", "attempt", *of_score, "created_at"],
            select(finished.c.rollout_id, finished.c.attempt, *score, db_now()),
        )
        .cte("rewarded")
    )
    ended = end_attempt.where(select(finished.c.rollout_id).exists()).cte("ended")
    return select(finished.c.rollout_id).add_cte(rewarded, ended)
