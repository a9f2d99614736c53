"""Filters of a batch's rollouts: each field is a condition on a rollout; empty fields are no condition."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from farm.records.request_values import Name, Request
from farm.records.rollout import Outcome, State

Order = Literal["newest", "reward", "tokens", "turns", "seconds"]
_Number = Annotated[float, Field(ge=-1e300, le=1e300)]
_Index = Annotated[int, Field(ge=0, le=2**31 - 1)]
_Text = Annotated[Name, Field(max_length=200)]


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
