"""The LLMs of roles: failures retried, calls limited, errors that name the role; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, ClassVar, cast

import pytest

from farm.errors import EngineError
from farm.records.request import Role, RoleEngine, SamplingParams
from tests.services.engines import Double, Server, Servers
from tests.services.virtual_time import run
from workers.plugins.interfaces import ChatModel, Completion
from workers.policy.generation import ChatRequest, Engine, EngineAddress
from workers.policy.role_models import RoleModels
from workers.policy.routing.pool import DedicatedEngines, EnginePool

HELLO = [{"role": "user", "content": "Are these equal?"}]


class Talker(Double):
    """Answers a chat with the seed that it received."""

    params: ClassVar[list[SamplingParams]] = []

    async def chat(self, request: ChatRequest) -> Completion:
        self.params.append(request.sampling)
        await self.server.answer(10, str(request.sampling.seed))
        text = f"{request.model} {request.sampling.temperature} {request.sampling.seed}"
        return Completion(
            response={"role": "assistant", "content": text},
            engine=self.server.url,
            n_prompt_tokens=1,
            n_response_tokens=1,
            finish_reason="stop",
        )


@asynccontextmanager
async def models_of(*servers: Server, **roles: RoleEngine) -> AsyncIterator[Mapping[str, ChatModel]]:
    loop, known = asyncio.get_running_loop(), Servers(*servers)

    def opened(address: EngineAddress, info: Any) -> Engine:
        return Talker(known.by_url[address.url], address, info)

    dedicated = DedicatedEngines(lambda action: loop.call_soon(action), opened, detect=known.detect, away_s=60.0)

    def of_farm() -> EnginePool:
        return EnginePool(lambda: [server.listed() for server in servers], open_engine=opened, detect=known.detect)

    with RoleModels(dedicated, of_farm).of(cast(dict[Role, RoleEngine], roles), "r1") as models:
        yield models
    await dedicated.aclose()


def judge(server: Server, **values: Any) -> RoleEngine:
    return RoleEngine(engine_url=server.url, model="m", **values)


def test_failures_are_retried_and_sampling_is_that_of_the_batch() -> None:
    async def main() -> None:
        server = Server("judge")
        server.failures = 2
        async with models_of(server, judge=judge(server, sampling=SamplingParams(temperature=0.5))) as models:
            assert await models["judge"].complete(HELLO, SamplingParams(temperature=0, seed=7)) == "m 0.5 7"
        async with models_of(server, judge=judge(server)) as models:
            assert await models["judge"].complete(HELLO, SamplingParams(temperature=0, seed=7)) == "m 0.0 7"
        assert server.n_detected == 0, "it is sent only its chat requests"

    run(main())


def test_role_is_not_sent_parameters_about_the_policys_tokens() -> None:
    async def main() -> None:
        server = Server("judge")
        own = SamplingParams(top_k=5, cache_salt="7", min_tokens=2, stop_token_ids=(3,))
        async with models_of(server, judge=judge(server)) as models:
            await models["judge"].complete(HELLO, own)
        sent = Talker.params[-1]
        assert (sent.top_k, sent.cache_salt, sent.min_tokens, sent.stop_token_ids) == (5, None, None, None)

    run(main())


def test_concurrent_calls_are_limited_by_the_batch() -> None:
    async def main() -> None:
        server = Server("judge")
        async with models_of(server, judge=judge(server, n_parallel=3)) as models:
            await asyncio.gather(*(models["judge"].complete(HELLO, SamplingParams(seed=n)) for n in range(12)))
        assert (server.n_most, len(server.answered)) == (3, 12)

    run(main())


def test_missing_answer_is_an_error_that_names_the_role() -> None:
    async def main() -> None:
        away, hung = Server("away"), Server("hung")
        away.dead = hung.hangs = True
        roles = {"judge": judge(away), "user": judge(hung, timeout_s=30)}
        async with models_of(away, hung, **roles) as models:
            with pytest.raises(EngineError, match=r"role judge: .*no engine after.*http://away/v1") as error:
                await models["judge"].complete(HELLO, SamplingParams())
            assert error.value.retryable
            with pytest.raises(EngineError, match="role user: no answer within 30 s"):
                await models["user"].complete(HELLO, SamplingParams())

    run(main())


def test_role_without_an_address_uses_the_farms_engines_of_its_model() -> None:
    async def main() -> None:
        server = Server("of-the-farm")
        async with models_of(server, user=RoleEngine(model="m")) as models:
            assert await models["user"].complete(HELLO, SamplingParams(seed=1)) == "m 1.0 1"

    run(main())
