"""Faults as a client sees them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from tests.doubles import EngineDouble
from workers.testing.serving import serving

WIRES: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": (
        "/inference/v1/generate",
        {"token_ids": [5, 9, 11], "sampling_params": {"logprobs": 0, "seed": 1}, "return_token_ids": True},
    ),
    "sglang": ("/generate", {"input_ids": [5, 9, 11], "return_logprob": True, "return_prompt_token_ids": True}),
}


@dataclass
class _Served:
    """A double, and a client that requests a generation from it."""

    double: EngineDouble
    client: httpx2.Client
    wire: str

    def ask(self, *, timeout_s: float = 20.0, **more: Any) -> httpx2.Response:
        path, body = WIRES[self.wire]
        return self.client.post(path, json={**body, **more}, timeout=timeout_s)


@pytest.fixture(params=["vllm", "sglang"])
def served(request: pytest.FixtureRequest) -> Iterator[_Served]:
    double = EngineDouble(wire=request.param, retry_after_s=2.5, slow_s=0.01)
    with serving(double.app()) as url, httpx2.Client(base_url=url) as client:
        yield _Served(double, client, request.param)


@pytest.mark.parametrize("kind", ["500", "502", "429", "503"])
def test_status_faults(served: _Served, kind: str) -> None:
    served.double.fail_next(kind)
    answer = served.ask()
    assert answer.status_code == int(kind)
    assert answer.headers.get("retry-after") == ("2.5" if kind == "429" else None)
    assert answer.headers["content-type"].startswith("text/html" if kind == "502" else "application/json")
    assert served.ask().status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["close", "reset"])
def test_broken_connections(served: _Served, kind: str, stream: bool) -> None:
    served.double.fail_next(kind)
    # a cut connection is seen as an end or as a reset
    with pytest.raises((httpx2.RemoteProtocolError, httpx2.ReadError)):
        served.ask(stream=stream)
    assert served.ask(stream=stream).status_code == 200
    assert served.double.faults.n_struck == {kind: 1}


def test_slow_and_hanging_answers(served: _Served) -> None:
    served.double.fail_next("slow")
    assert served.ask().status_code == 200
    served.double.fail_next("hang")
    with pytest.raises(httpx2.ReadTimeout):
        served.ask(timeout_s=0.2)
    assert served.double.n_started == 2


@pytest.mark.parametrize("stream", [False, True])
def test_garbage_answers(served: _Served, stream: bool) -> None:
    served.double.fail_next("garbage")
    answer = served.ask(stream=stream)
    assert answer.status_code == 200
    with pytest.raises(json.JSONDecodeError):
        answer.json()


def lengths(wire: str, answer: dict[str, Any]) -> tuple[int, int]:
    """Return the number of ids and the number of log-probabilities."""
    if wire == "sglang":
        return len(answer["output_ids"]), len(answer["meta_info"]["output_token_logprobs"])
    (choice,) = answer["choices"]
    return len(choice["token_ids"]), len(choice["logprobs"]["content"])


def test_wrong_lengths(served: _Served) -> None:
    served.double.fail_next("lengths")
    n_ids, n_logprobs = lengths(served.wire, served.ask().json())
    assert n_ids == n_logprobs + 1
    n_ids, n_logprobs = lengths(served.wire, served.ask().json())
    assert n_ids == n_logprobs


def test_changed_prompt_is_returned(served: _Served) -> None:
    served.double.fail_next("echo")
    assert [served.ask().json()["prompt_token_ids"] for _ in range(2)] == [[5, 10, 11], [5, 9, 11]]


def test_faults_occur_at_their_rate(served: _Served) -> None:
    served.double.faults.set_rates({"500": 0.5})
    statuses = [served.ask().status_code for _ in range(30)]
    assert 5 < statuses.count(500) < 25
    assert statuses.count(500) + statuses.count(200) == 30
    assert "double:faults_total" in served.client.get("/metrics").text


def test_faults_can_be_set_over_http(served: _Served) -> None:
    def post_faults(**body: Any) -> httpx2.Response:
        return served.client.post("/double/faults", json=body)

    assert post_faults(next={"500": 1}, rates={"503": 1.0}).status_code == 200
    assert [served.ask().status_code for _ in range(2)] == [500, 503]
    assert post_faults(clear=True).json() == {"struck": {"500": 1, "503": 1}, "healthy": True}
    assert served.ask().status_code == 200
    assert post_faults(next={"501": 1}).status_code == 400
    post_faults(healthy=False)
    assert served.client.get("/health").status_code == 503


def test_idle_connections_are_closed() -> None:
    double = EngineDouble()
    with serving(double.app(), keep_alive_s=0.05) as url, httpx2.Client(base_url=url) as client:
        with client.stream("GET", "/health") as answer:
            answer.read()
            connection = answer.extensions["network_stream"].get_extra_info("socket")
        connection.settimeout(20.0)
        assert connection.recv(1) == b""
