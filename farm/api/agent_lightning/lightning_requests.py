"""Bodies and queries of requests. Unknown fields are refused, and known fields with values that the farm lacks."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from farm.records.request_values import Json, Name, Request, Seconds

ATTEMPT = "0"
"""The only attempt: the farm's own attempts are not shown."""
_Id = Annotated[Name, Field(min_length=1, max_length=200)]


class LightningState(StrEnum):
    """The state of a rollout."""

    QUEUING = "queuing"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class LocalRunner(Request):
    """`agent_class` is an agent of the farm by name; it overrides the handler's choice."""

    agent_class: Annotated[Name, Field(max_length=64)] | None = None
    env_map: Annotated[dict[str, str], Field(max_length=0)] = Field(default_factory=dict)


class RunnerConfig(Request):
    """The farm is the runner, so there are no job templates for others."""

    timeout_seconds: Seconds = 3600
    local: LocalRunner | None = None
    k8s: None = None


class NewRollout(Request):
    """A rollout. `input` is a row with its `data_source`, and its `fields` unless these are its other columns."""

    input: dict[str, Any]
    is_train: bool = True
    config: RunnerConfig | None = None
    metadata: Json | None = None
    rollout_id: _Id | None = None


class NewRollouts(Request):
    rollouts: Annotated[list[NewRollout], Field(max_length=100_000)]


class StatusPatch(Request):
    state: LightningState | None = None
    k8s_job_name: None = None
    last_attempt_id: None = None
    error_message: str | None = None


class RolloutPatch(Request):
    status: StatusPatch | None = None


class NewEvent(Request):
    event_type: _Id
    data: Json = Field(default_factory=dict)


class EventsQuery(Request):
    event_type: str | None = None
    format: Literal["triplet"] | None = None
    include_routed_experts: bool = True


_Place = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]


class TerminalQuery(Request):
    """Values below the minimum count as the minimum: 0 and 1."""

    after: _Place = 0
    limit: _Place = 1000


class ListQuery(Request):
    """`state_in` may be repeated; it is read as a list."""

    state_in: Annotated[list[LightningState], Field(min_length=1)]
    limit: Annotated[int, Field(ge=1, le=10_000)] = 500


class ModelServer(Request):
    """A model server, and the name of its model."""

    model: Annotated[Name, Field(min_length=1, max_length=200)]
    endpoint: Annotated[Name, Field(max_length=500)]
    version: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0


class ModelServers(Request):
    models: Annotated[list[ModelServer], Field(max_length=10_000)]


class PauseRequest(Request):
    retry_after_seconds: Annotated[int, Field(ge=0, le=86_400)] = 5
    reason: Annotated[Name, Field(max_length=1000)] | None = None
