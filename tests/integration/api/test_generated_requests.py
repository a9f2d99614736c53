"""Requests generated from the API's description, valid or not, are answered as described, and never with a 500."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import quote

import httpx2
import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from farm.api.app import ENDPOINTS
from farm.client.local import LocalFarm
from farm.notifications import Signals
from farm.store.database import Store
from tests.integration.api.generated_requests import ANYTHING, matching_values
from tests.services.api import KEY, served
from tests.services.farms import NOOP
from tests.services.soak import SOAK_MINUTES, repeats

N_EXAMPLES = repeats(6, 300)


class _Described:
    """A served API, its description, and ids of existing objects."""

    def __init__(self, client: httpx2.Client, ids: list[str]) -> None:
        self.client = client
        self.ids = ids
        self.document = client.get("/openapi.json").json()
        self.schemas = self.document["components"]["schemas"]

    def check(self, operation: dict[str, Any], answer: httpx2.Response, streamed: bool) -> None:
        """Raise AssertionError unless the description has this answer."""
        documented = operation["responses"].get(str(answer.status_code))
        assert documented is not None, f"{answer.status_code} is not described: {'' if streamed else answer.text[:300]}"
        for media_type, content in documented["content"].items():
            assert answer.headers["content-type"].partition(";")[0] == media_type
            if media_type == "application/json" and not streamed:
                jsonschema.validate(answer.json(), {**content["schema"], "components": self.document["components"]})


@pytest.fixture(scope="module")
def described(migrated_sqlite: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Described]:
    folder = tmp_path_factory.mktemp("generated")
    (folder / "farm.db").write_bytes(migrated_sqlite.read_bytes())
    with ExitStack() as stack:
        store = Store(f"sqlite:///{folder / 'farm.db'}")
        stack.callback(store.close)
        service = LocalFarm(store, Signals(""), 10_000)
        batch_id = service.submit({"instances": [NOOP], "n_samples": 2})
        url = stack.enter_context(served(service))
        client = stack.enter_context(httpx2.Client(base_url=url, headers={"x-api-key": KEY}, timeout=60))
        yield _Described(client, [batch_id, f"{batch_id}.0", f"{batch_id}.0.0", "b0000000000", "0" * 64])


def _texts(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | list | dict) else str(value)


# the served API draws random pauses in this process, which hypothesis attributes to strategies
@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning")
@pytest.mark.soak
@pytest.mark.parametrize("place", sorted(ENDPOINTS), ids=" ".join)
def test_generated_requests_are_answered_as_described(described: _Described, place: tuple[str, str]) -> None:
    method, path = place
    operation = described.document["paths"][path][method.lower()]
    parameters = operation.get("parameters", [])
    streams = "text/event-stream" in operation["responses"]["200"]["content"]
    queries = {
        each["name"]: matching_values(each["schema"], described.schemas) | ANYTHING
        for each in parameters
        # a long poll would only test the clock
        if each["in"] == "query" and each["name"] != "wait_s"
    }
    ids = st.sampled_from(described.ids) | st.text(st.characters(codec="utf-8", exclude_characters="/?#"), max_size=12)
    body_schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    bodies = matching_values(body_schema, described.schemas) if body_schema else ANYTHING

    @settings(
        max_examples=N_EXAMPLES,
        deadline=None,
        database=None,
        derandomize=not SOAK_MINUTES,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(
        id=ids,
        query=st.fixed_dictionaries({}, optional=queries),
        body=bodies | ANYTHING,
        raw=st.none() | st.binary(max_size=30),
    )
    def one(id: str, query: dict[str, Any], body: Any, raw: bytes | None) -> None:
        address = path.replace("{id}", quote(id, safe="") or "b0")
        address = address.replace("{digest}", "0" * 64)
        sent = {name: _texts(value) for name, value in query.items()}
        options: dict[str, Any] = {"params": sent}
        if method == "POST":
            data = json.dumps(body).encode() if raw is None or not isinstance(body, str) else raw
            options |= {"content": data, "headers": {"content-type": "application/json"}}
        with described.client.stream(method, address, **options) as answer:
            assert answer.status_code != 500, answer.read()
            if not (streams and answer.is_success):
                answer.read()
            described.check(operation, answer, streams and answer.is_success)

    one()


def test_fuzz_check_detects_an_undescribed_response(described: _Described) -> None:
    operation = described.document["paths"]["/v1/nodes"]["get"]
    answer = described.client.get("/v1/batches")
    with pytest.raises(jsonschema.ValidationError):
        described.check(operation, answer, streamed=False)
