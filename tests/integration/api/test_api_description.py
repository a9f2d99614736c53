"""The API describes itself: every route and type, in a valid document that its answers match."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import httpx2
import jsonschema
import pytest

from farm.api.app import ENDPOINTS
from farm.api.endpoints import ApiConfig, Endpoint, Endpoints, EndpointTable
from farm.api.openapi import description
from farm.callers import Scope
from farm.client.local import LocalFarm
from farm.notifications import Signals
from farm.settings import settings
from farm.store.database import Store
from tests.services.api import KEY, served
from tests.services.farms import NOOP


@pytest.fixture
def client(sqlite_store: Store) -> Iterator[httpx2.Client]:
    headers = {"authorization": f"Bearer {KEY}"}
    with (
        served(LocalFarm(sqlite_store, Signals(""), 1000)) as url,
        httpx2.Client(base_url=url, headers=headers) as made,
    ):
        yield made


def test_openapi_document_is_valid_and_its_routes_exist(client: httpx2.Client) -> None:
    from openapi_spec_validator import validate

    document = client.get("/openapi.json").json()
    validate(document)
    for method, path in ENDPOINTS:
        # an unknown route is a 404 with this text, or a 405
        answer = client.request(method, path.replace("{id}", "b0"))
        assert not answer.text.count("there is no /"), f"{method} {path} is described and is not there"
        assert answer.status_code != 405, f"{method} {path}"
    assert client.get("/").json()["description"] == "/openapi.json"


def test_served_routes_are_described(sqlite_store: Store) -> None:
    endpoints = Endpoints(LocalFarm(sqlite_store, Signals(""), 1000), ApiConfig.of(settings()))
    routes = endpoints.routes(ENDPOINTS)
    result = {(method, route.path) for route in routes for method in (route.methods or ()) if method != "HEAD"}
    assert result == set(ENDPOINTS)


def test_function_with_an_argument_that_its_path_lacks_is_refused() -> None:
    def status(farm: LocalFarm, id: str) -> str:
        return farm.status(id).batch_id

    endpoints = EndpointTable()
    with pytest.raises(TypeError, match="GET /v1/status has no id"):
        endpoints.add("GET", "/v1/status", "The progress of a batch.", Scope.READ)(status)
    assert not endpoints


def test_responses_match_their_schemas(client: httpx2.Client) -> None:
    document = client.get("/openapi.json").json()
    batch_id = client.post("/v1/batches", json={"instances": [NOOP]}).json()["batch_id"]
    for path in ("/v1/batches", "/v1/batches/{id}", "/v1/batches/{id}/rollouts", "/v1/nodes", "/v1/engines", "/"):
        answer = client.get(path.replace("{id}", batch_id)).json()
        schema = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
        jsonschema.validate(answer, {**schema, "components": document["components"]})


def test_metrics_are_served_by_the_api(client: httpx2.Client) -> None:
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "farm_store_up 1.0" in answer.text


@dataclass
class Listed:
    numbers: Sequence[int]
    order: Literal["drain", "keep"]
    names: Mapping[str, tuple[str, ...]]


def returning(kind: Any) -> Mapping[tuple[str, str], Endpoint]:
    """Return a table with one endpoint that returns a type."""

    def answer(farm: LocalFarm) -> Any:
        raise NotImplementedError

    answer.__annotations__["return"] = kind
    endpoints = EndpointTable()
    endpoints.add("GET", "/v1/any", "Anything.", Scope.READ)(answer)
    return endpoints


def test_fields_of_a_record_are_described_by_their_types() -> None:
    assert description(returning(Listed))["components"]["schemas"]["Listed"]["properties"] == {
        "numbers": {"type": "array", "items": {"type": "integer"}},
        "order": {"enum": ["drain", "keep"]},
        "names": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "string"}}},
    }


def test_type_without_a_schema_is_refused() -> None:
    with pytest.raises(TypeError, match=r"complex.* has no schema"):
        description(returning(complex))
