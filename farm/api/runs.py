"""Training runs over HTTP: batches by key, records of steps, solve rates."""

from __future__ import annotations

from starlette.routing import Route

from farm.api.endpoints import Endpoints
from farm.api.openapi import Described, EndpointDescription
from farm.api.schemas import ApiRequest, BatchKeys, GroupIds, RatesQuery, StepQuery, StepRecord
from farm.callers import Scope
from farm.records.request import Instance
from farm.records.training_run import KeyedBatch, RecordedStep, SolveRate

ENDPOINTS: Described = {
    ("POST", "/v1/keyed_batches"): EndpointDescription(
        "The batches with these idempotency keys.",
        list[KeyedBatch],
        body=BatchKeys,
        scope=Scope.READ,
    ),
    ("POST", "/v1/instances"): EndpointDescription(
        "The submitted instances of these groups, for submitting them again.",
        list[Instance],
        body=GroupIds,
        scope=Scope.SUBMIT,
    ),
    ("GET", "/v1/steps"): EndpointDescription(
        "The record of a training run's newest step: a list of at most one.",
        list[RecordedStep],
        StepQuery,
        scope=Scope.READ,
    ),
    ("POST", "/v1/steps"): EndpointDescription(
        "Record a step, unless it is recorded.", RecordedStep, body=StepRecord, scope=Scope.SUBMIT
    ),
    ("POST", "/v1/solve_rates"): EndpointDescription(
        "The solve rates of instances in a training run.", list[SolveRate], body=RatesQuery, scope=Scope.READ
    ),
}


def routes(endpoints: Endpoints) -> list[Route]:
    """Return the routes of training runs."""
    runs = endpoints.farm.runs

    def recorded(request: ApiRequest) -> list[RecordedStep]:
        wanted = request.parse_query(StepQuery)
        step = runs.recorded_step(wanted.run, wanted.up_to)
        return [] if step is None else [step]

    def record(request: ApiRequest) -> RecordedStep:
        body = request.parse_body(StepRecord)
        return runs.record_step(body.run, body.step, body.record)

    def rates(request: ApiRequest) -> list[SolveRate]:
        body = request.parse_body(RatesQuery)
        window = {"min_version": body.min_version, "solved_at": body.solved_at}
        return list(runs.solve_rates(body.run, body.data_source, body.instance_ids, **window))  # type: ignore[arg-type]

    return [
        endpoints.post("/v1/keyed_batches", lambda request: runs.keyed_batches(request.parse_body(BatchKeys).keys)),
        endpoints.post("/v1/instances", lambda request: runs.instances(request.parse_body(GroupIds).group_ids)),
        endpoints.get("/v1/steps", recorded),
        endpoints.post("/v1/steps", record),
        endpoints.post("/v1/solve_rates", rates),
    ]
