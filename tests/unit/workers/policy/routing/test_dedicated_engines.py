"""Engines of batches: one shared pool each while in use, separate from the farm's; in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from farm.errors import EngineError
from farm.records.engine import EngineInfo
from tests.services.engines import Server, Servers, engine_call, routed
from tests.services.virtual_time import run
from workers.policy.generation import EngineAddress
from workers.policy.routing.pool import DedicatedEngines, EnginePool
from workers.policy.routing.router import RoutingKey, StickyRouter

N = 10


@asynccontextmanager
async def engines_of(servers: Servers, **options: Any) -> AsyncIterator[DedicatedEngines]:
    loop = asyncio.get_running_loop()
    engines = DedicatedEngines(lambda action: loop.call_soon(action), servers.open, detect=servers.detect, **options)
    try:
        yield engines
    finally:
        await engines.aclose()
    assert [server.n_clients for server in servers.by_url.values()] == [0] * len(servers.by_url)


async def call_once(pool: EnginePool, name: str) -> str:
    return await routed(StickyRouter(pool, RoutingKey(name)), N, engine_call(N, name))


async def settled(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - in virtual time polling costs nothing
            await asyncio.sleep(0.01)


def address(server: Server, **values: Any) -> EngineAddress:
    return EngineAddress(server.url, **values)


def test_dedicated_engine_is_called_only_by_its_own_rollouts() -> None:
    async def main() -> None:
        mine, other = Server("mine"), Server("other")
        async with engines_of(Servers(mine, other)) as engines:
            with engines.pool(address(mine)) as pool, engines.pool(address(other)) as another:
                assert await asyncio.gather(*[call_once(pool, f"r{i}") for i in range(8)]) == [mine.url] * 8
                assert await call_once(another, "s") == other.url
                mine.dead = True
                waiting = asyncio.create_task(call_once(pool, "r"))
                await asyncio.sleep(30)
                assert (waiting.done(), other.answered) == (False, ["s"])
                mine.dead = False
                assert await waiting == mine.url

    run(main())


def test_concurrent_users_share_a_pool_and_later_ones_its_probe() -> None:
    async def main() -> None:
        server = Server("a")
        async with engines_of(Servers(server)) as engines:
            for _ in range(3):
                with engines.pool(address(server)) as one, engines.pool(address(server)) as other:
                    assert one is other
                    await asyncio.gather(call_once(one, "r"), call_once(other, "s"))
                await settled(lambda: server.n_clients == 0)
        assert server.n_detected == 1

    run(main())


def test_engine_with_another_key_is_another_engine() -> None:
    async def main() -> None:
        server = Server("a")
        server.key = "right"
        async with engines_of(Servers(server)) as engines:
            with engines.pool(address(server, key="right")) as right, engines.pool(address(server, key="bad")) as wrong:
                assert await call_once(right, "r") == server.url
                with pytest.raises(EngineError, match="401"):
                    await call_once(wrong, "s")
        assert server.answered == ["r"]

    run(main())


def test_unreachable_engine_ends_the_call_and_is_probed_again() -> None:
    async def main() -> None:
        server = Server("a")
        async with engines_of(Servers(server), away_s=60.0) as engines:
            with engines.pool(address(server)) as pool:
                assert await call_once(pool, "r") == server.url
                server.dead = True
                began = pool.now()
                with pytest.raises(EngineError, match="no engine after 60 s: engine http://a/v1 is out") as error:
                    await call_once(pool, "r")
                assert error.value.retryable
                assert 60 <= pool.now() - began < 90
            server.dead = False
            with engines.pool(address(server)) as pool:
                assert await call_once(pool, "r") == server.url
        assert server.n_detected == 2

    run(main())


def test_number_of_kept_capabilities_is_limited() -> None:
    async def main() -> None:
        servers = [Server(f"e{i}") for i in range(3)]
        async with engines_of(Servers(*servers), n_known=2) as engines:
            for server in (*servers, *servers[1:], servers[0]):
                with engines.pool(address(server)) as pool:
                    await call_once(pool, "r")
        assert [server.n_detected for server in servers] == [2, 1, 1]

    run(main())


def test_plain_chat_engine_is_never_probed() -> None:
    async def main() -> None:
        server = Server("a")
        async with engines_of(Servers(server)) as engines:
            with engines.pool(address(server, model="m", plain_chat=True)) as pool:
                server.failures = 2
                assert await call_once(pool, "r") == server.url
                await asyncio.sleep(600)
                assert [place.info for place in pool.backends] == [EngineInfo(kind="openai", model="m")]
        assert server.n_detected == 0

    run(main())
