"""New weights in a real vLLM: they must change its output to that of transformers with them, call by call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import numpy as np
import pytest

from farm.records.request import SamplingParams
from farm.records.trajectory import token_ids
from tests.contract.engine_promises import Bench
from tests.vllm.server import RealVllm, in_vllm
from workers.policy.engines import detect, open_engine
from workers.policy.engines.client import EngineClient
from workers.policy.generation import Engine, EngineAddress, Generation
from workers.testing.engine.model_text import make_tokenizer

PROMPT = token_ids([5, 9, 11, 70, 71, 72, 100])
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def reloaded(vllm: RealVllm) -> Iterator[RealVllm]:
    """The server, which has its first weights again afterwards."""
    yield vllm
    load(vllm, 0)


def load(vllm: RealVllm, number: int) -> None:
    """Reload the weights, like a trainer between pause and resume."""
    vllm.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(vllm.weights[number])}})
    vllm.post("/reset_prefix_cache?reset_running_requests=true")


def same(found: Generation, expected: dict[str, list[float]]) -> bool:
    """Return True if ids and log-probabilities are those that transformers computes."""
    assert found.response_logprobs is not None
    return found.response_ids.tolist() == expected["ids"] and np.allclose(
        found.response_logprobs, expected["logprobs"], atol=1e-3
    )


async def greedy(engine: Engine) -> Generation:
    return await engine.generate(PROMPT, GREEDY, 8)


def test_call_continues_with_the_new_weights_and_reports_them(reloaded: RealVllm) -> None:
    words = (*reloaded.weights, json.dumps(PROMPT.tolist()), 8)
    before, after = json.loads(in_vllm(reloaded.python, "reference.py", *words))

    async def update() -> None:
        address = EngineAddress(f"{reloaded.url}/v1")
        engine = open_engine(address, await detect(address, timeout_s=300.0))
        assert isinstance(engine, EngineClient)
        bench = Bench(engine, make_tokenizer())
        try:
            await engine.set_version("1")
            assert same(await greedy(engine), before)
            task, _ = await bench.paused("keep")
            load(reloaded, 1)
            await engine.set_version("2")
            await engine.resume()
            assert [span.version for span in (await task).versions] == ["1", "2"]
            renewed = await greedy(engine)
            assert same(renewed, after)
            assert not same(renewed, before)
            assert [span.version for span in renewed.versions] == ["2"]
        finally:
            await engine.resume()
            await engine.aclose()

    asyncio.run(update())


def test_server_loads_weights_from_the_path_of_the_trainer(reloaded: RealVllm) -> None:
    words = (*reloaded.weights, json.dumps(PROMPT.tolist()), 8)
    before, after = json.loads(in_vllm(reloaded.python, "reference.py", *words))

    async def update() -> None:
        address = EngineAddress(f"{reloaded.url}/v1")
        engine = open_engine(address, await detect(address, timeout_s=300.0))
        try:
            assert same(await greedy(engine), before)
            await engine.load_weights(str(reloaded.weights[1]))
            await engine.set_version("2")
            renewed = await greedy(engine)
            assert same(renewed, after)
            assert [span.version for span in renewed.versions] == ["2"]
        finally:
            await engine.aclose()

    asyncio.run(update())
