"""Model servers that a trainer registers: engines of the farm, which it pauses while it updates their weights.

Unknown fields of requests are refused, and known fields with values that the farm lacks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field

from farm.api.protocols import KeptState
from farm.client.local import LocalFarm
from farm.configuration.service_urls import normal_url
from farm.errors import FarmUnreachable, InvalidRequest, NotFound, ServiceError
from farm.records.request_values import Json, Name, Request, Seconds

_NAME = "agent-lightning"
_WAITED_S = 1e9
"""The waiting time after which a pause counts as followed without any worker: then nothing is in flight."""

ATTEMPT = "0"
"""The only attempt: the farm's own attempts are not shown."""
_Id = Annotated[Name, Field(min_length=1, max_length=200)]
_Place = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]


class LightningModels:
    """The servers that were registered by this protocol; other engines of the farm are not touched."""

    def __init__(self, farm: LocalFarm) -> None:
        self._farm = farm
        self._state = KeptState(farm.runs, "agent-lightning:models")

    def register(self, servers: Sequence[ModelServer]) -> list[dict[str, Any]]:
        """Add servers, all or none. Raises InvalidRequest."""
        urls: dict[str, str] = {}
        for index, server in enumerate(servers):
            try:
                urls[normal_url(server.endpoint)] = server.model
            except InvalidRequest as error:
                raise InvalidRequest(error.complaints[0][1], field=f"models[{index}].endpoint") from None
        state = self._state.change(lambda known: {**known, "urls": {**known.get("urls", {}), **urls}})
        for url, model in urls.items():
            self._farm.add_engine(url, model)
        if state.get("paused") and urls:
            self._farm.orders.order_pause("drain", _NAME, list(urls))
        return [server.model_dump(mode="json") for server in servers]

    def delete_all(self) -> None:
        """Remove all of them; calls in flight end."""
        known = self._registered(self._state.read())
        self._state.change(lambda state: {**state, "urls": {}})
        for url in known:
            with suppress(NotFound):
                self._farm.remove_engine(url)

    def model(self) -> str:
        """Return the model of the rollouts, empty for any. Raises ServiceError if there is no server."""
        names = sorted(set(self._registered(self._state.read()).values()))
        if not names and not self._farm.engines():
            raise ServiceError("No servers available: register one, POST /api/models")
        return names[0] if len(names) == 1 else ""

    def pause(self, request: PauseRequest) -> dict[str, Any]:
        """Send no new calls to them until `resume`; calls in flight run to their end."""
        paused = {"paused": True, "retry_after_seconds": request.retry_after_seconds, "reason": request.reason}
        state = self._state.change(lambda known: {**known, **paused})
        if urls := self._in_use(state):
            self._farm.orders.order_pause("drain", _NAME, urls)
        return self.pause_state()

    def resume(self) -> dict[str, Any]:
        """Send calls to them again."""
        state = self._state.change(lambda known: {**known, "paused": False, "reason": None})
        if urls := self._in_use(state):
            self._farm.orders.order_pause("", "", urls)
        return self.pause_state()

    def pause_state(self) -> dict[str, Any]:
        """Return whether they are paused, and how many calls are in flight.

        A worker that has not confirmed the pause counts as one call, as it may begin one.
        """
        state = self._state.read()
        return {
            "paused": bool(state.get("paused")),
            "retry_after_seconds": state.get("retry_after_seconds", 5),
            "reason": state.get("reason"),
            "inflight": self._n_in_flight(state),
        }

    def _n_in_flight(self, state: Mapping[str, Any]) -> int:
        urls = self._in_use(state)
        n_calls = sum(each.n_calls for each in self._farm.engines() if each.engine.url in urls)
        if not state.get("paused"):
            return n_calls
        orders = {engine.url: engine.n_orders for engine in self._farm.orders.chosen(urls)}
        try:
            unacknowledged = self._farm.orders.left(orders, _WAITED_S)
        except FarmUnreachable:
            return 0
        return max(n_calls, len([each for each in unacknowledged if "was not told" not in each]))

    def _registered(self, state: Mapping[str, Any]) -> Mapping[str, str]:
        urls: Mapping[str, str] = state.get("urls", {})
        return urls

    def _in_use(self, state: Mapping[str, Any]) -> list[str]:
        """Return those that are still engines of the farm: they may have been removed there."""
        urls = {each.engine.url for each in self._farm.engines()}
        return [url for url in self._registered(state) if url in urls]


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
