"""The experts that an engine recorded for the tokens of model calls, stored separately from the calls.

A token has hundreds of bytes of experts, but eight of id and log-probability. So experts are read only for trainers,
and each call stores only those of its new tokens, like its ids. They belong to one attempt, as model calls do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from sqlalchemy import Connection, Integer, Select, bindparam, func, select
from sqlalchemy.dialects import postgresql, sqlite

from farm.records.experts.expert_stretches import ExpertStretch, assembled
from farm.records.experts.routed_experts import CallExperts, ExpertIds
from farm.records.rollout import Rollout
from farm.records.trajectory import Segment
from farm.store.sql.schema import CallExpertsRow

call_experts = CallExpertsRow.__table__

PAGE_BYTES = 64_000_000
"""The limit for the bytes of experts in a page of a stream; a single group may exceed it."""

_PUT = {
    "sqlite": sqlite.insert(call_experts).on_conflict_do_nothing(),
    "postgresql": postgresql.insert(call_experts).on_conflict_do_nothing(),
}


def keep(connection: Connection, rollout_id: str, attempt: int, call_index: int, experts: CallExperts) -> None:
    """Store the experts of a call, unless they exist: a write may be repeated."""
    if experts.ids is None:
        return
    _, n_layers, top_k = experts.ids.shape
    values: dict[str, Any] = {"rollout_id": rollout_id, "attempt": attempt, "call_index": call_index}
    values |= {"start": experts.start, "n_layers": n_layers, "top_k": top_k, "ids": experts.ids.reshape(-1)}
    connection.execute(_PUT[connection.dialect.name], values)


def first_fitting(connection: Connection, groups: Sequence[Sequence[Rollout]]) -> list[Rollout]:
    """Return the rollouts of the first groups whose experts fit in PAGE_BYTES together; at least one group."""
    sizes = _sizes(connection, [rollout.rollout_id for group in groups for rollout in group]) if groups else {}
    rollouts: list[Rollout] = []
    room = PAGE_BYTES
    for group in groups:
        room -= sum(sizes.get(rollout.rollout_id, 0) for rollout in group)
        if rollouts and room < 0:
            break
        rollouts += group
    return rollouts


def _sizes(connection: Connection, rollout_ids: Sequence[str]) -> dict[str, int]:
    """Return rollout id → stored bytes of its calls' experts, for rollouts that have any."""
    found = connection.execute(_sizes_statement(), {"b_ids": rollout_ids}).tuples()
    return {rollout_id: int(n) for rollout_id, n in found}


@cache
def _sizes_statement() -> Select[Any]:
    n_bytes = func.sum(func.length(call_experts.c.ids, type_=Integer))
    named = call_experts.c.rollout_id.in_(bindparam("b_ids", expanding=True))
    return select(call_experts.c.rollout_id, n_bytes).where(named).group_by(call_experts.c.rollout_id)


def with_experts(
    connection: Connection, rollout_id: str, attempt: int, rows: Sequence[tuple[Segment, Iterable[Sequence[int]]]]
) -> list[Segment]:
    """Return the rows of one attempt with their experts; each comes with its stretches, [begin, end, call, at]."""
    pairs = [(row, [ExpertStretch(*each) for each in stretches]) for row, stretches in rows]
    named = {each.call for _, stretches in pairs for each in stretches}
    of_calls = _of_calls(connection, rollout_id, attempt, named) if named else {}
    return [
        replace(row, routed_experts=assembled(len(row.prompt_ids) + len(row.response_ids), stretches, of_calls))
        for row, stretches in pairs
    ]


def _of_calls(connection: Connection, rollout_id: str, attempt: int, named: Iterable[int]) -> Mapping[int, ExpertIds]:
    statement = select(call_experts).where(
        call_experts.c.rollout_id == rollout_id,
        call_experts.c.attempt == attempt,
        call_experts.c.call_index.in_(sorted(named)),
    )
    return {row.call_index: row.ids.reshape(-1, row.n_layers, row.top_k) for row in connection.execute(statement)}
