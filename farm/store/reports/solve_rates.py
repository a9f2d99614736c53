"""Solve rates of instances, counted on request from the rollouts of a training run.

An index finds the rollouts of an instance, so no second table has to agree with the first; see
`python -m benchmarks.solve_rates`.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, case, func, literal, select

from farm.records.rollout import POLICY_OUTCOMES
from farm.records.training_run import SolveRate
from farm.store.rollouts import CHUNK, batches, rollouts


def solve_rates(
    connection: Connection,
    run: str,
    data_source: str,
    instance_ids: Sequence[str] | None = None,
    min_version: int | None = None,
    solved_at: float = 1.0,
) -> list[SolveRate]:
    """Count the scored rollouts of a run by instance: of these instance ids, or of all instances with an id.

    Solved is a reward of at least `solved_at`. With `min_version`, only rollouts count whose newest token was sampled
    by such weights or newer ones. Broken rollouts have no score and never count.
    """
    solved = func.sum(case((rollouts.c.reward >= solved_at, 1), else_=0))
    of_run = select(literal(1)).where(batches.c.batch_id == rollouts.c.batch_id, batches.c.run == run)
    statement = (
        select(rollouts.c.instance_id, func.count(literal(1)), solved, func.avg(rollouts.c.reward))
        .where(
            rollouts.c.data_source == data_source,
            rollouts.c.reward.is_not(None),
            rollouts.c.outcome.in_([outcome.value for outcome in POLICY_OUTCOMES]),
            of_run.exists(),
        )
        .group_by(rollouts.c.instance_id)
        .order_by(rollouts.c.instance_id)
    )
    if min_version is not None:
        statement = statement.where(rollouts.c.version_max >= min_version)
    if instance_ids is None:
        return [SolveRate(*row) for row in connection.execute(statement)]
    wanted = sorted(set(instance_ids))
    result: list[SolveRate] = []
    for start in range(0, len(wanted), CHUNK):
        some = rollouts.c.instance_id.in_(wanted[start : start + CHUNK])
        result += [SolveRate(*row) for row in connection.execute(statement.where(some))]
    return sorted(result, key=lambda rate: rate.instance_id)
