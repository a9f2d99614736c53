"""Calls that take time: pauses, aborts, clients that go away, weights that change, queues."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest

from workers.testing.engine import EngineDouble
from workers.testing.engine.scheduler import Speed
from workers.testing.promises.expect import until
from workers.testing.serving import serving

_SOON_S = 20.0
GENERATE = "/inference/v1/generate"
Check = Callable[[httpx2.AsyncClient], Awaitable[None]]


def on(double: EngineDouble, check: Check) -> None:
    async def run(url: str) -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=_SOON_S) as client:
            await check(client)

    with serving(double.app()) as url:
        asyncio.run(run(url))


def endless(n: int = 100_000, **more: Any) -> dict[str, Any]:
    sampling = {"max_tokens": n, "ignore_eos": True, "logprobs": 0, "seed": 1}
    return {"token_ids": [5, 9, 11], "sampling_params": sampling, **more}


def begin(client: httpx2.AsyncClient, **more: Any) -> asyncio.Task[httpx2.Response]:
    return asyncio.create_task(client.post(GENERATE, json=endless(**more)))


async def choice(task: Awaitable[httpx2.Response]) -> dict[str, Any]:
    found: dict[str, Any] = (await task).json()["choices"][0]
    return found


def slow(**options: Any) -> EngineDouble:
    return EngineDouble(tokens_per_s=1000.0, **options)


def test_abort_keeps_what_was_sampled() -> None:
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


def test_newer_ones_refuse_calls_while_they_are_paused() -> None:
    async def check(client: httpx2.AsyncClient) -> None:
        await client.post("/pause?mode=abort")
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        answer = await client.post(GENERATE, json=endless(n=3))
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "ServiceUnavailableError"
        await client.post("/resume")
        assert (await client.post(GENERATE, json=endless(n=3))).status_code == 200

    on(EngineDouble(version="0.33.0"), check)


def test_keep_freezes_and_goes_on_under_other_weights() -> None:
    double = slow()

    async def check(client: httpx2.AsyncClient) -> None:
        task = begin(client, n=5000)
        await until(lambda: double.n_tokens > 5, "tokens are sampled")
        await client.post("/pause?mode=keep")
        frozen = double.n_tokens
        queued = begin(client, n=2)
        await until(lambda: double.n_waiting == 1, "a call waits")
        assert (double.n_tokens, double.n_running) == (frozen, 1)
        await client.post("/update_weight_version", json={"new_version": "8"})
        assert (await client.get("/weight_info")).json() == {"weight_version": "8"}
        double.scheduler.speed = Speed()
        await client.post("/resume")
        whole = await choice(task)
        assert whole["finish_reason"] == "length"
        assert whole["weight_versions"] == [
            {"version": "default", "start": 0, "end": frozen},
            {"version": "8", "start": frozen, "end": 5000},
        ]
        assert len((await choice(queued))["token_ids"]) == 2

    on(double, check)


def test_wait_lets_what_runs_end_first() -> None:
    double = slow()

    async def check(client: httpx2.AsyncClient) -> None:
        task = begin(client, n=100)
        await until(lambda: double.n_started == 1, "a call has begun")
        await client.post("/pause?mode=wait")
        assert double.n_running == 0
        assert len((await choice(task))["token_ids"]) == 100

    on(double, check)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_call(stream: bool) -> None:
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


def test_one_that_waits_can_go_away_too() -> None:
    double = EngineDouble(version="0.32.0")

    async def check(client: httpx2.AsyncClient) -> None:
        await client.post("/pause")
        task = begin(client)
        await until(lambda: double.n_waiting == 1, "a call waits")
        task.cancel()
        await until(lambda: double.n_waiting == 0, "none waits")
        assert (double.n_started, double.n_cancelled) == (0, 1)

    on(double, check)


def test_calls_are_aborted_by_the_ids_that_the_server_gave_them() -> None:
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


def test_slots_and_a_queue() -> None:
    double = slow(max_running=1, max_queued=1)

    async def check(client: httpx2.AsyncClient) -> None:
        runs = begin(client)
        await until(lambda: double.n_running == 1, "a call runs")
        waits = begin(client, n=4)
        await until(lambda: double.n_waiting == 1, "a call waits")
        refused = await client.post(GENERATE, json=endless())
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "Service Unavailable"
        runs.cancel()
        assert len((await choice(waits))["token_ids"]) == 4

    on(double, check)


def test_a_cut_call_goes_on_as_if_it_had_not_been() -> None:
    """The log-probabilities too: they are of the ids, wherever a call began."""

    async def check(client: httpx2.AsyncClient) -> None:
        def asked(prompt: list[int], n: int) -> dict[str, Any]:
            return {"token_ids": prompt, "sampling_params": {"max_tokens": n, "logprobs": 0, "ignore_eos": True}}

        first = await choice(client.post(GENERATE, json=asked([5, 9], 6)))
        second = await choice(client.post(GENERATE, json=asked([5, 9, *first["token_ids"]], 6)))
        echo = {"prompt": [5, 9, *first["token_ids"]], "max_tokens": 6, "ignore_eos": True, "logprobs": 0}
        completed = await choice(client.post("/v1/completions", json=echo))
        values = [one["logprob"] for one in second["logprobs"]["content"]]
        assert values == completed["logprobs"]["token_logprobs"]
        assert len(values) == 6

    on(EngineDouble(), check)


def test_the_prefix_cache_is_counted_and_emptied() -> None:
    double = EngineDouble()

    async def check(client: httpx2.AsyncClient) -> None:
        async def cached(prompt: list[int]) -> tuple[int, list[int]]:
            body = {"token_ids": prompt, "sampling_params": {"max_tokens": 40, "ignore_eos": True}}
            found = (await client.post(GENERATE, json=body)).json()
            n: int = found["usage"]["prompt_tokens_details"]["cached_tokens"]
            return n, found["choices"][0]["token_ids"]

        prompt = list(range(100))
        first, ids = await cached(prompt)
        # The next turn has the answer of this one; its last token was never computed.
        second, _ = await cached([*prompt, *ids, 7, 7])
        assert (first, second) == (0, 128)
        assert (double.n_prefix_queries, double.n_prefix_hits) == (242, 128)
        await client.post("/pause?mode=keep&clear_cache=false")
        await client.post("/resume")
        assert (await cached(prompt))[0] == 96
        for path in ("/pause?mode=keep", "/reset_prefix_cache"):
            await client.post(path)
            await client.post("/resume")
            assert (await cached(prompt))[0] == 0

    on(double, check)


def test_a_prompt_takes_its_time_before_the_first_token() -> None:
    double = EngineDouble(prefill_per_s=1e-3)

    async def check(client: httpx2.AsyncClient) -> None:
        task = asyncio.create_task(client.post(GENERATE, json=endless(n=1)))
        await until(lambda: double.n_running == 1, "a call runs")
        assert not double.n_tokens
        task.cancel()
        await until(lambda: not double.n_running, "none runs")

    on(double, check)
    assert Speed(tokens_per_s=1000.0).step == 10
    assert Speed(tokens_per_s=1.0).step == 1
    assert Speed().step == 0


def test_a_stream_comes_as_it_is_sampled() -> None:
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
