"""Ended rollouts of a batch with their stages and calls, as far as traces show them: no prompts, no tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

from sqlalchemy import Connection, Table, select

from farm.records.rollout import Rollout, Timing
from farm.records.trajectory import ModelCall
from farm.store import batches
from farm.store.rollouts import rollouts
from farm.store.sql.schema import ModelCallRow

_calls = cast(Table, ModelCallRow.__table__)


class TracedRollout(NamedTuple):
    """A rollout, its stages, and its calls by attempt."""

    rollout: Rollout
    timings: list[Timing]
    calls: dict[int, list[ModelCall]]


def ended_between(connection: Connection, batch_id: str, after: int, last: int) -> list[str]:
    """Return the rollouts of a batch with end numbers in (`after`, `last`]."""
    ended = (rollouts.c.batch_id == batch_id, rollouts.c.finish_seq > after, rollouts.c.finish_seq <= last)
    return list(connection.execute(select(rollouts.c.rollout_id).where(*ended)).scalars())


def traced(connection: Connection, rollout_id: str) -> TracedRollout:
    """Return one rollout for its trace. Raises NotFound."""
    calls: dict[int, list[ModelCall]] = {}
    for attempt, call in _calls_of(connection, rollout_id):
        calls.setdefault(attempt, []).append(call)
    found = batches.rollout(connection, rollout_id)
    return TracedRollout(found, batches.timings(connection, rollout_id), calls)


def _calls_of(connection: Connection, rollout_id: str) -> Iterator[tuple[int, ModelCall]]:
    names = (
        *("attempt", "call_index", "response", "finish_reason", "engine", "policy_version"),
        *("started_at", "latency_s", "n_prompt_tokens", "n_response_tokens"),
    )
    statement = (
        select(*[_calls.c[name] for name in names])
        .where(_calls.c.rollout_id == rollout_id)
        .order_by(_calls.c.attempt, _calls.c.call_index)
    )
    for row in connection.execute(statement).mappings():
        values = dict(row)
        yield values.pop("attempt"), ModelCall(index=values.pop("call_index"), messages=[], **values)
