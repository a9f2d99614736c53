"""Calls that take time: pauses, weight updates, queues, the prefix cache."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2

from tests.services.engine_calls import GENERATE, begin, choice, endless, on
from workers.conformance.trial import until
from workers.testing.engine import ScriptedEngine
from workers.testing.engine.scheduler import SimulatedSpeed


def slow(**options: Any) -> ScriptedEngine:
    return ScriptedEngine(tokens_per_s=1000.0, **options)


def test_calls_are_refused_during_a_pause() -> None:
    async def check(client: httpx2.AsyncClient) -> None:
        await client.post("/pause?mode=abort")
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        answer = await client.post(GENERATE, json=endless(n=3))
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "ServiceUnavailableError"
        await client.post("/resume")
        assert (await client.post(GENERATE, json=endless(n=3))).status_code == 200

    on(ScriptedEngine(), check)


def test_keep_mode_freezes_calls_and_continues_with_other_weights() -> None:
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
        double.scheduler.speed = SimulatedSpeed()
        await client.post("/resume")
        whole = await choice(task)
        assert whole["finish_reason"] == "length"
        assert whole["weight_versions"] == [
            {"version": "default", "start": 0, "end": frozen},
            {"version": "8", "start": frozen, "end": 5000},
        ]
        assert len((await choice(queued))["token_ids"]) == 2

    on(double, check)


def test_wait_mode_lets_running_calls_end_first() -> None:
    double = slow()

    async def check(client: httpx2.AsyncClient) -> None:
        task = begin(client, n=100)
        await until(lambda: double.n_started == 1, "a call has begun")
        await client.post("/pause?mode=wait")
        assert double.n_running == 0
        assert len((await choice(task))["token_ids"]) == 100

    on(double, check)


def test_abort_mode_frees_slots_at_once_and_leaves_nothing_in_the_cache() -> None:
    double = slow(max_running=1)

    async def check(client: httpx2.AsyncClient) -> None:
        cut = [begin(client), begin(client)]
        await until(lambda: double.n_tokens > 40 and double.n_waiting == 1, "one call runs and one waits")
        # within one turn of the loop, so that no call has seen its end yet
        await double.scheduler.pause("abort")
        assert double.n_running == 0
        assert [(await choice(task))["finish_reason"] for task in cut] == ["abort", "abort"]
        assert (double.n_started, double.scheduler.cache.usage) == (1, 0.0)

    on(double, check)


def test_slots_and_queue_are_limited() -> None:
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


def test_prefix_cache_is_counted_and_cleared() -> None:
    double = ScriptedEngine()

    async def check(client: httpx2.AsyncClient) -> None:
        async def cached(prompt: list[int]) -> tuple[int, list[int]]:
            body = {"token_ids": prompt, "sampling_params": {"max_tokens": 40, "ignore_eos": True}}
            result = (await client.post(GENERATE, json=body)).json()
            n: int = result["usage"]["prompt_tokens_details"]["cached_tokens"]
            return n, result["choices"][0]["token_ids"]

        prompt = list(range(100))
        first, ids = await cached(prompt)
        # The next turn contains the answer of this one; its last token was never computed.
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


def test_prompt_takes_time_before_the_first_token() -> None:
    double = ScriptedEngine(prefill_per_s=1e-3)

    async def check(client: httpx2.AsyncClient) -> None:
        task = asyncio.create_task(client.post(GENERATE, json=endless(n=1)))
        await until(lambda: double.n_running == 1, "a call runs")
        assert not double.n_tokens
        task.cancel()
        await until(lambda: not double.n_running, "none runs")

    on(double, check)
    assert SimulatedSpeed(tokens_per_s=1000.0).step == 10
    assert SimulatedSpeed(tokens_per_s=1.0).step == 1
    assert SimulatedSpeed().step == 0
