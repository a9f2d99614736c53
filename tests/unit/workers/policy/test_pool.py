from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from farm.errors import EngineError
from farm.request import SamplingParams
from workers.interfaces import Completion, Policy
from workers.policy.engines import EngineAddress
from workers.policy.pool import EnginePool
from workers.testing.serving import serving

ASKED = [{"role": "user", "content": "hello"}]


class Engine:
    """Counts its calls; fails while `broken`; answers only once `gate` is open."""

    def __init__(self) -> None:
        self.n_calls = 0
        self.broken = False
        self.models: list[str] = []

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])])

    async def _chat(self, request: Request) -> Response:
        self.n_calls += 1
        self.models.append((await request.json())["model"])
        if self.broken:
            return JSONResponse({"error": "broken"}, status_code=500)
        choice = {"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
        return JSONResponse({"choices": [choice]})


class Farm:
    """Two engines and a pool over them."""

    def __init__(self, stack: ExitStack) -> None:
        self.engines = [Engine(), Engine()]
        urls = [stack.enter_context(serving(engine.app())) for engine in self.engines]
        self.addresses = [EngineAddress(f"{url}/v1", model="m") for url in urls]
        self.pool = EnginePool(lambda: self.addresses, timeout_s=20, max_retries=0)

    @property
    def n_calls(self) -> list[int]:
        return [engine.n_calls for engine in self.engines]


def ask(policy: Policy) -> Any:
    return policy.complete(ASKED, [], SamplingParams(), 10)


async def closing(farm: Farm, *work: Any) -> list[Completion]:
    try:
        return list(await asyncio.gather(*work))
    finally:
        await farm.pool.aclose()


def test_a_rollout_stays_with_its_engine() -> None:
    async def turns(policy: Policy) -> None:
        for _ in range(3):
            await ask(policy)

    with ExitStack() as stack:
        farm = Farm(stack)
        asyncio.run(closing(farm, turns(farm.pool.policy("r1"))))
        assert sorted(farm.n_calls) == [0, 3]


def test_calls_spread_over_engines() -> None:
    with ExitStack() as stack:
        farm = Farm(stack)
        asyncio.run(closing(farm, *[ask(farm.pool.policy(f"r{index}")) for index in range(6)]))
        assert farm.n_calls == [3, 3]


def test_another_engine_takes_over_and_the_broken_one_is_avoided() -> None:
    async def turns(policy: Policy) -> None:
        for _ in range(3):
            await ask(policy)

    with ExitStack() as stack:
        farm = Farm(stack)
        farm.engines[0].broken = True
        asyncio.run(closing(farm, turns(farm.pool.policy("r1"))))
        assert farm.n_calls == [1, 3]


def test_when_all_fail_the_rollout_is_named() -> None:
    with ExitStack() as stack:
        farm = Farm(stack)
        for engine in farm.engines:
            engine.broken = True
        with pytest.raises(EngineError, match=r"rollout r1: engine http.*answered 500"):
            asyncio.run(closing(farm, ask(farm.pool.policy("r1"))))
        assert farm.n_calls == [1, 1]


def test_an_engine_that_is_taken_away_is_left() -> None:
    async def turns(farm: Farm) -> None:
        policy = farm.pool.policy("r1")
        await ask(policy)
        del farm.addresses[0]
        await ask(policy)

    with ExitStack() as stack:
        farm = Farm(stack)
        asyncio.run(closing(farm, turns(farm)))
        assert farm.n_calls == [1, 1]


def test_models_choose_engines() -> None:
    with ExitStack() as stack:
        farm = Farm(stack)
        farm.addresses[1] = EngineAddress(farm.addresses[1].url, model="other")
        asyncio.run(closing(farm, *[ask(farm.pool.policy(f"r{index}", "other")) for index in range(3)]))
        assert farm.n_calls == [0, 3]
        assert set(farm.engines[1].models) == {"other"}
        with pytest.raises(EngineError, match="no engine serves missing"):
            asyncio.run(closing(farm, ask(farm.pool.policy("r1", "missing"))))


def test_a_pool_serves_one_event_loop_after_another() -> None:
    with ExitStack() as stack:
        farm = Farm(stack)
        for _ in range(2):
            asyncio.run(closing(farm, ask(farm.pool.policy("r1"))))
        assert sum(farm.n_calls) == 2
