"""Filtered rollouts of a batch in pages: the cost of a page does not depend on the number of rows before it.

A page begins after the last row of the previous page, by the sort value and then by id, so new rows do not shift it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field
from sqlalchemy import ColumnElement, Connection, Select, and_, literal, or_, select

from farm.errors import InvalidRequest, NotFound
from farm.ids import RolloutRef
from farm.records.request_values import Name, Request
from farm.records.rollout import POLICY_OUTCOMES, Outcome, Rollout, State
from farm.store.batches import rollouts_by
from farm.store.blobs.stored_annotations import annotation_rows
from farm.store.rollouts import rollouts
from farm.store.trajectories import model_calls

Order = Literal["newest", "reward", "tokens", "turns", "seconds"]
_Number = Annotated[float, Field(ge=-1e300, le=1e300)]
_Index = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Text = Annotated[Name, Field(max_length=200)]

_row = rollouts.c
_seconds = _row.finished_at - _row.submitted_at
_ORDERS: dict[str, Any] = {
    "newest": _row.finish_seq,
    "reward": _row.reward,
    "tokens": _row.n_response_tokens,
    "turns": _row.n_turns,
    "seconds": _seconds,
}
_FLOATS = ("reward", "seconds")
_POLICYS = sorted(outcome.value for outcome in POLICY_OUTCOMES)
_OURS = sorted(
    outcome.value for outcome in Outcome if outcome not in POLICY_OUTCOMES | {Outcome.CANCELLED, Outcome.STALE}
)
_LONGEST_CURSOR = 200


class RolloutFilter(Request):
    """Conditions on rollouts, and their order.

    `ours` is True for rollouts that the farm broke, False for those that their policy ended. `message` is part of the
    failure's text, `engine` the URL of one that answered a call, `version` weights that sampled a token, `step` a
    trainer's step that has annotations of the rollout. `seconds` are counted from submission to end. `newest` is the
    order by end. Open rollouts are shown only with `state` queued or active.
    """

    state: State | None = None
    outcome: Outcome | None = None
    ours: bool | None = None
    failure: Outcome | None = None
    message: _Text = ""
    data_source: _Text = ""
    instance_id: _Text = ""
    group: _Index | None = None
    node: _Text = ""
    engine: Annotated[Name, Field(max_length=500)] = ""
    version: _Index | None = None
    step: _Index | None = None
    min_reward: _Number | None = None
    max_reward: _Number | None = None
    min_tokens: _Index | None = None
    max_tokens: _Index | None = None
    min_turns: _Index | None = None
    max_turns: _Index | None = None
    min_seconds: _Number | None = None
    max_seconds: _Number | None = None
    finished_after: _Number | None = None
    finished_before: _Number | None = None
    order: Order = "newest"
    ascending: bool = False

    @property
    def is_of_live(self) -> bool:
        """True if the filter selects open rollouts."""
        return self.state in (State.QUEUED, State.ACTIVE)


EVERY = RolloutFilter()
"""The filter for all ended rollouts."""


@dataclass(frozen=True, slots=True)
class RolloutPage:
    """Some rollouts, without training rows; `after` is the cursor of the next page, empty on the last."""

    rollouts: Sequence[Rollout]
    after: str


def page(connection: Connection, batch_id: str, wanted: RolloutFilter, after: str = "", limit: int = 50) -> RolloutPage:
    """Return the page that begins after a cursor. Raises InvalidRequest for an invalid cursor."""
    statement = select(rollouts).where(_row.batch_id == batch_id, *conditions(wanted))
    statement = _by_position(statement, after) if wanted.is_of_live else _by_value(statement, wanted, after)
    matches = rollouts_by(connection, statement.limit(limit + 1))
    shown = matches[:limit]
    more = len(matches) > limit
    return RolloutPage(shown, _cursor(shown[-1], wanted) if more else "")


def conditions(wanted: RolloutFilter) -> list[ColumnElement[bool]]:
    """Return the conditions of a filter; ended rollouts, unless its `state` names an open state."""
    conditions: list[ColumnElement[bool]] = [
        _row.finish_seq.is_(None) if wanted.is_of_live else _row.finish_seq.is_not(None)
    ]
    enums = ((_row.state, wanted.state), (_row.outcome, wanted.outcome), (_row.failure_kind, wanted.failure))
    conditions += [column == value.value for column, value in enums if value is not None]
    if wanted.ours is not None:
        conditions.append(_row.outcome.in_(_OURS if wanted.ours else _POLICYS))
    if wanted.message:
        conditions.append(_row.failure_message.contains(wanted.message, autoescape=True))
    texts = ((_row.data_source, wanted.data_source), (_row.instance_id, wanted.instance_id), (_row.node, wanted.node))
    conditions += [column == text for column, text in texts if text]
    if wanted.group is not None:
        conditions.append(_row.group_index == wanted.group)
    if wanted.engine:
        of_engine = select(literal(1)).where(
            model_calls.c.rollout_id == _row.rollout_id, model_calls.c.engine == wanted.engine
        )
        conditions.append(of_engine.exists())
    if wanted.version is not None:
        conditions += [_row.version_min <= wanted.version, _row.version_max >= wanted.version]
    if wanted.step is not None:
        of_step = select(literal(1)).where(
            annotation_rows.c.rollout_id == _row.rollout_id, annotation_rows.c.step == wanted.step
        )
        conditions.append(of_step.exists())
    ranges: Sequence[tuple[Any, float | None, float | None]] = (
        (_row.reward, wanted.min_reward, wanted.max_reward),
        (_row.n_response_tokens, wanted.min_tokens, wanted.max_tokens),
        (_row.n_turns, wanted.min_turns, wanted.max_turns),
        (_seconds, wanted.min_seconds, wanted.max_seconds),
        (_row.finished_at, wanted.finished_after, wanted.finished_before),
    )
    for column, least, most in ranges:
        if least is not None:
            conditions.append(column >= least)
        if most is not None:
            conditions.append(column <= most)
    if wanted.order == "reward":
        # rollouts without a score have no place in this order
        conditions.append(_row.reward.is_not(None))
    return conditions


def _by_value(statement: Select[Any], wanted: RolloutFilter, after: str) -> Select[Any]:
    column = _ORDERS[wanted.order]
    if after:
        value, rollout_id = _parsed(after)
        is_value = _is_finite(value) if wanted.order in _FLOATS else _is_index(value)
        if not is_value or not _is_rollout(rollout_id):
            raise _no_cursor()
        value = float(value) if wanted.order in _FLOATS else value
        beyond = column > value if wanted.ascending else column < value
        behind = _row.rollout_id > rollout_id if wanted.ascending else _row.rollout_id < rollout_id
        statement = statement.where(or_(beyond, and_(column == value, behind)))
    order = (column, _row.rollout_id)
    return statement.order_by(*(order if wanted.ascending else (each.desc() for each in order)))


def _by_position(statement: Select[Any], after: str) -> Select[Any]:
    if after:
        group, sample = _parsed(after)
        if not _is_index(group) or not _is_index(sample):
            raise _no_cursor()
        later = and_(_row.group_index == group, _row.sample_index > sample)
        statement = statement.where(or_(_row.group_index > group, later))
    return statement.order_by(_row.group_index, _row.sample_index)


def _cursor(last: Rollout, wanted: RolloutFilter) -> str:
    if wanted.is_of_live:
        return json.dumps([last.group_index, last.sample_index])
    value = {
        "newest": last.finish_seq,
        "reward": last.reward,
        "tokens": last.n_response_tokens,
        "turns": last.n_turns,
        "seconds": (last.finished_at or 0.0) - last.submitted_at,
    }[wanted.order]
    return json.dumps([value, last.rollout_id])


def _parsed(after: str) -> tuple[Any, Any]:
    try:
        first, second = json.loads(after[:_LONGEST_CURSOR])
    except (ValueError, TypeError, RecursionError):
        raise _no_cursor() from None
    return first, second


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


def _is_finite(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)


def _is_rollout(text: Any) -> bool:
    try:
        return RolloutRef.of(text).kind == "rollout"
    except NotFound:
        return False


def _no_cursor() -> InvalidRequest:
    return InvalidRequest("is no cursor that a page gave: begin without one", field="after")


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Failed rollouts of one kind with the same first line; `example` is the newest, `nodes` where they failed."""

    kind: str
    first_line: str
    n: int
    nodes: Sequence[str]
    example: str


def failure_groups(
    connection: Connection, batch_id: str, limit: int = 1000, wanted: RolloutFilter = EVERY
) -> list[FailureGroup]:
    """Return the failures that match a filter, most frequent first, among the newest `limit` failed ones of a batch."""
    columns = (_row.rollout_id, _row.failure_kind, _row.failure_message, _row.node)
    # one that has not ended may have failed before; with the condition an index holds the order
    ended = (_row.batch_id == batch_id, _row.finish_seq.is_not(None))
    statement = (
        select(*columns)
        .where(*ended, _row.failure_kind.is_not(None), *conditions(wanted))
        .order_by(_row.finish_seq.desc())
        .limit(limit)
    )
    groups: dict[tuple[str, str], list[Any]] = {}
    for row in connection.execute(statement):
        line = (row.failure_message or "").strip().partition("\n")[0][:300]
        groups.setdefault((row.failure_kind, line), []).append(row)
    failures = [
        FailureGroup(kind, line, len(rows), sorted({each.node for each in rows if each.node})[:20], rows[0].rollout_id)
        for (kind, line), rows in groups.items()
    ]
    return sorted(failures, key=lambda group: (-group.n, group.kind, group.first_line))
