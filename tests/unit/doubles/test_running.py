"""Calls that take time: aborts, clients that disconnect, servers before 0.33 that queue calls."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.doubles import EngineDouble
from tests.services.engine_calls import GENERATE, begin, choice, endless, on
from workers.conformance.trial import until


def slow(**options: Any) -> EngineDouble:
    return EngineDouble(tokens_per_s=1000.0, **options)


def test_abort_keeps_sampled_tokens() -> None:
    double = slow(version="0.32.0")

    async def check(client: httpx2.AsyncClient) -> None:
        task = begin(client)
        await until(lambda: double.n_tokens > 5, "tokens are sampled")
        assert (await client.post("/pause?mode=abort")).json() == {"status": "paused"}
        cut = await choice(task)
        assert cut["finish_reason"] == "abort"
        assert 5 < len(cut["token_ids"]) == len(cut["logprobs"]["content"]) == cut["weight_versions"][-1]["end"]
        waits = begin(client, n=3)
        await until(lambda: double.n_waiting == 1, "a call waits")
        await client.post("/update_weight_version", json={"new_version": "7"})
        await client.post("/resume")
        after = await choice(waits)
        assert after["weight_versions"] == [{"version": "7", "start": 0, "end": 3}]
        assert after["token_ids"] == cut["token_ids"][:3]

    on(double, check)


@pytest.mark.parametrize("stream", [False, True])
def test_call_ends_when_its_client_disconnects(stream: bool) -> None:
    double = slow()

    async def check(client: httpx2.AsyncClient) -> None:
        task = begin(client, stream=stream)
        await until(lambda: double.n_tokens > 5, "tokens are sampled")
        task.cancel()
        await until(lambda: double.n_cancelled == 1, "the call is cancelled")
        assert double.n_running == 0
        metrics = (await client.get("/metrics")).text
        assert 'vllm:num_requests_running{engine="0",model_name="scripted-test-double"} 0.0' in metrics

    on(double, check)


def test_queued_call_ends_when_its_client_disconnects() -> None:
    double = EngineDouble(version="0.32.0")

    async def check(client: httpx2.AsyncClient) -> None:
        await client.post("/pause")
        task = begin(client)
        await until(lambda: double.n_waiting == 1, "a call waits")
        task.cancel()
        await until(lambda: double.n_waiting == 0, "none waits")
        assert (double.n_started, double.n_cancelled) == (0, 1)

    on(double, check)


def test_calls_are_aborted_by_ids_of_the_server() -> None:
    double = slow()

    async def check(client: httpx2.AsyncClient) -> None:
        one, other = begin(client, request_id="one"), begin(client, request_id="other")
        await until(lambda: double.n_running == 2, "two calls run")
        bare = await client.post("/abort_requests", json={"request_ids": ["one"]})
        assert bare.json() == {"status": "aborted", "aborted": 1}
        assert double.n_running == 2
        await client.post("/abort_requests", json={"request_ids": ["generate-tokens-one"]})
        assert (await choice(one))["finish_reason"] == "abort"
        assert double.n_running == 1
        await client.post("/abort_requests", json={})
        assert (await choice(other))["finish_reason"] == "abort"

    on(double, check)


def test_cut_call_continues_as_if_uncut() -> None:
    """So do its log-probabilities: they depend on the ids only, not on where a call began."""

    async def check(client: httpx2.AsyncClient) -> None:
        def body_of(prompt: list[int], n: int) -> dict[str, Any]:
            return {"token_ids": prompt, "sampling_params": {"max_tokens": n, "logprobs": 0, "ignore_eos": True}}

        first = await choice(client.post(GENERATE, json=body_of([5, 9], 6)))
        second = await choice(client.post(GENERATE, json=body_of([5, 9, *first["token_ids"]], 6)))
        echo = {"prompt": [5, 9, *first["token_ids"]], "max_tokens": 6, "ignore_eos": True, "logprobs": 0}
        completed = await choice(client.post("/v1/completions", json=echo))
        values = [one["logprob"] for one in second["logprobs"]["content"]]
        assert values == completed["logprobs"]["token_logprobs"]
        assert len(values) == 6

    on(EngineDouble(), check)


def test_stream_arrives_while_it_is_sampled() -> None:
    double = slow(version="0.32.0")

    async def check(client: httpx2.AsyncClient) -> None:
        ids: list[int] = []
        async with client.stream("POST", GENERATE, json=endless(stream=True)) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))["choices"][0]
                    ids += event["token_ids"]
                    if len(ids) == 4:
                        await client.post("/pause?mode=abort")
        assert event["finish_reason"] == "abort"
        assert event["weight_versions"] == [{"version": "default", "start": 0, "end": len(ids)}]

    on(double, check)
