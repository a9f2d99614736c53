"""The routes of NeMo Gym's agent server; its errors are `{"detail": …}`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.routing import BaseRoute

from farm.api.endpoints import Endpoints
from farm.api.nemo_gym.gym_responses import AggregateRequest, aggregate, run_result
from farm.api.nemo_gym.gym_rows import RowIdentity, RowNames, batch_request, identity_of, named_as_sent, row_names
from farm.api.protocol_parts import await_batch, refuse_with_detail
from farm.api.protocols import WireProtocol
from farm.api.schemas import ApiRequest, RequestRejected
from farm.api.scopes import RouteScopes
from farm.callers import Scope
from farm.client.http_errors import ProblemDetails
from farm.client.local import LocalFarm
from farm.errors import Conflict, InvalidRequest, ServiceError
from farm.ids import rollout_id
from farm.records.rollout import Rollout
from farm.store.reports import keyed_rollouts

_WAIT_S = 86_400.0
"""Seconds that `/run` waits: its clients have no time limit."""
_CONSUMER = "nemo-gym"
_HEALTH = ("/", "/health", "/healthz", "/livez", "/readyz")
_UNSCORED = (
    "an unscored run is not a rollout of the farm: send a row to /run, whose answer has the response and the reward"
)


@dataclass(frozen=True, slots=True)
class SubmittedRow:
    """A row that was submitted as a batch of one rollout, or found again."""

    row: dict[str, Any]
    names: RowNames
    identity: RowIdentity
    batch_id: str


class _Routes:
    """The verbs, on the endpoints of an API."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._farm = endpoints.farm

    def routes(self) -> list[BaseRoute]:
        endpoints = self._endpoints
        return [
            endpoints.route("POST", "/run", self._run),
            endpoints.post("/v1/responses", self._unscored, takes_body=False),
            endpoints.post("/aggregate_metrics", lambda request: _aggregated(request)),
            *(endpoints.health(path) for path in _HEALTH),
        ]

    async def _run(self, request: ApiRequest) -> dict[str, Any]:
        """Answer once the rollout has ended. A client that left without the answer may ask again."""
        endpoints = self._endpoints
        submitted = await endpoints.run(_submitted, self._farm, request)
        is_disconnected = request.is_disconnected
        # released here, as it may be large and the wait long
        del request
        await await_batch(endpoints, submitted.batch_id, _WAIT_S, is_disconnected)
        rollout, result = await endpoints.run(_result, self._farm, submitted)
        if submitted.identity.key and not submitted.identity.is_lasting and not await is_disconnected():
            await endpoints.run(self._farm.acknowledge_up_to, submitted.batch_id, rollout.cursor, _CONSUMER)
        return result

    def _unscored(self, request: ApiRequest) -> Any:
        raise RequestRejected(ProblemDetails(501, "NotAllowed", _UNSCORED))


def _submitted(farm: LocalFarm, request: ApiRequest) -> SubmittedRow:
    """Submit a row, or find its rollout. Raises InvalidRequest, UnknownHandler, Conflict, ServiceError."""
    row = request.body
    names = row_names(row)
    identity = identity_of(names, row)
    key = identity.key if identity.is_lasting or not identity.key else _next_key(farm, identity.key)
    batch = batch_request(names, row, key)
    if not batch.engine_url and not farm.engines():
        raise ServiceError(
            "there is no model server: name it in the row, policy_base_url, or add one to the farm, `farm engines add`"
        )
    try:
        return SubmittedRow(row, names, identity, farm.submit(batch))
    except InvalidRequest as error:
        raise named_as_sent(error) from None
    except Conflict:
        message = (
            f"_ng_rollout_id {names.rollout_id!r} belongs to a different request: use another one, or a new attempt"
        )
        raise Conflict(message) from None


def _next_key(farm: LocalFarm, key: str) -> str:
    """Return the key of the row's rollout whose answer is still due; of a new one if all answers were given.

    A row that is collected again, for example by a later evaluation, has the same indices.
    """
    n = len(farm.store.read(partial(keyed_rollouts.batches_named, prefix=f"{key}:")))
    if n:
        last = f"{key}:{n - 1}"
        for batch in farm.runs.keyed_batches([last]):
            is_open = farm.has_open(batch.batch_id)
            if is_open or not farm.acknowledged(batch.batch_id, _CONSUMER):
                return last
    return f"{key}:{n}"


def _result(farm: LocalFarm, submitted: SubmittedRow) -> tuple[Rollout, dict[str, Any]]:
    name = rollout_id(submitted.batch_id, 0, 0)
    rollout = farm.rollout(name)
    return rollout, run_result(submitted.row, submitted.names, rollout, farm.calls(name))


def _aggregated(request: ApiRequest) -> dict[str, Any]:
    return aggregate(request.parse_body(AggregateRequest).verify_responses)


def _routes(endpoints: Endpoints) -> Sequence[BaseRoute]:
    return _Routes(endpoints).routes()


_SCOPES: RouteScopes = {
    ("POST", "/run"): Scope.SUBMIT,
    ("POST", "/v1/responses"): Scope.SUBMIT,
    ("POST", "/aggregate_metrics"): Scope.READ,
    **{("GET", path): Scope.READ for path in _HEALTH},
}

PROTOCOL = WireProtocol(_routes, refuse_with_detail, _SCOPES)
