"""The pool over real connections: scripted engines are probed, fail, hang up, die and are paused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from farm.records.engine_state import StoredEngine
from farm.records.request import SamplingParams
from farm.records.trajectory import token_ids
from tests.doubles import EngineDouble
from tests.services.engines import RecordingReporter, routed
from workers.policy.generation import Engine, EngineBusy, Generation
from workers.policy.routing.load import IDLE
from workers.policy.routing.pool import EnginePool
from workers.policy.routing.router import RoutingKey, StickyRouter
from workers.testing.serving import serving

PROMPT = token_ids(range(10, 40))


class Fleet:
    """Running engines, and the list of them."""

    def __init__(self, stack: ExitStack, *doubles: EngineDouble) -> None:
        self.servers = [stack.enter_context(ExitStack()) for _ in doubles]
        urls = [
            server.enter_context(serving(double.app())) for server, double in zip(self.servers, doubles, strict=True)
        ]
        self.doubles = {f"{url}/v1": double for url, double in zip(urls, doubles, strict=True)}
        self.list = [StoredEngine(url) for url in self.doubles]

    def __call__(self) -> list[StoredEngine]:
        return self.list

    def order(self, **values: Any) -> None:
        self.list = [replace(each, **values) for each in self.list]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@asynccontextmanager
async def pool_of(fleet: Fleet, reporter: RecordingReporter | None = None) -> AsyncIterator[EnginePool]:
    pool = EnginePool(fleet, reporter=reporter, check_s=0.2)
    try:
        yield pool
    finally:
        await pool.aclose()
    assert all(pool.load_tracker.own(url) == IDLE for url in fleet.doubles)


async def sample(engine: Engine, n: int = 16) -> tuple[str, Generation]:
    generation = await engine.generate(PROMPT, SamplingParams(), n)
    return engine.address.url, generation


def run_call(pool: EnginePool, name: str, ask: Callable[[Engine], Any] = sample) -> Any:
    return routed(StickyRouter(pool, RoutingKey(name)), 16, ask)


async def wait_until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - what is waited for is another thread's
            await asyncio.sleep(0.01)


def test_engines_are_detected_and_used(stack: ExitStack) -> None:
    fleet = Fleet(stack, EngineDouble(wire="vllm"), EngineDouble(wire="sglang"))

    async def main() -> None:
        notes = RecordingReporter()
        async with pool_of(fleet, notes) as pool:
            answers = await asyncio.gather(*[run_call(pool, f"r{i}") for i in range(12)])
            assert {url for url, _ in answers} <= set(fleet.doubles)
            assert all(len(result.response_ids) for _, result in answers)
            await wait_until(lambda: len(notes.infos) == 2)
            assert sorted(info.kind for info in notes.infos.values()) == ["sglang", "vllm"]
            await wait_until(lambda: {info.tool_format for info in notes.infos.values()} == {"hermes"})

    asyncio.run(main())


@pytest.mark.parametrize("fault", ["500", "502", "429", "503", "close", "reset", "garbage"])
def test_call_succeeds_despite_an_engine_fault(stack: ExitStack, fault: str) -> None:
    doubles = [EngineDouble(retry_after_s=0.2), EngineDouble(retry_after_s=0.2)]
    fleet = Fleet(stack, *doubles)
    for double in doubles:
        double.fail_next(fault)

    async def main() -> None:
        async with pool_of(fleet) as pool:
            answers = await asyncio.gather(*[run_call(pool, f"r{i}") for i in range(6)])
            assert all(len(result.response_ids) for _, result in answers)

    asyncio.run(main())


def test_calls_on_a_dead_engine_move_to_another(stack: ExitStack) -> None:
    fleet = Fleet(stack, EngineDouble(tokens_per_s=20), EngineDouble(tokens_per_s=20))

    async def ask(engine: Engine) -> Generation:
        return (await sample(engine, 1000))[1]

    async def main() -> None:
        async with pool_of(fleet) as pool:
            await pool.start()
            await wait_until(lambda: all(place.info is not None for place in pool.backends))
            calls = [asyncio.create_task(run_call(pool, f"r{i}", ask)) for i in range(12)]
            await wait_until(lambda: all(double.n_running > 1 for double in fleet.doubles.values()))
            # it still samples, but reports that it is dead: its answer is not waited for
            dead = next(iter(fleet.doubles.values()))
            dead.healthy = False
            await wait_until(lambda: dead.n_cancelled)
            await wait_until(lambda: dead.n_running == 0)
            assert all(len(result.response_ids) for result in await asyncio.gather(*calls))

    asyncio.run(main())


def test_engine_is_paused_versioned_and_resumed_over_its_own_protocol(stack: ExitStack) -> None:
    fleet = Fleet(stack, EngineDouble(tokens_per_s=200))
    (double,) = fleet.doubles.values()

    async def main() -> None:
        notes = RecordingReporter(leading=True)
        async with pool_of(fleet, notes) as pool:
            await run_call(pool, "first")
            (url,) = notes.infos
            fleet.order(info=notes.infos[url])

            async def ask(engine: Engine) -> Generation:
                generation = await engine.generate(PROMPT, SamplingParams(), 4000)
                if generation.finish_reason == "abort":
                    raise EngineBusy("cut short")
                return generation

            call = asyncio.create_task(run_call(pool, "long", ask))
            await wait_until(lambda: double.n_running)
            fleet.order(paused="abort", n_orders=1)
            pool.changed()
            await wait_until(lambda: (url, 1, "abort", "") in notes.orders)
            assert double.n_running == 0
            fleet.order(version="7", version_order=2, n_orders=2, n_done=1, engine_paused="abort")
            pool.changed()
            await wait_until(lambda: (url, 2, "abort", "7") in notes.orders)
            fleet.order(paused="", n_orders=3, n_done=2, engine_version="7")
            pool.changed()
            await wait_until(lambda: (url, 3, "", "7") in notes.orders)
            assert {span.version for span in (await call).versions} <= {"7"}

    asyncio.run(main())


def test_cancelled_call_is_cancelled_on_the_engine(stack: ExitStack) -> None:
    fleet = Fleet(stack, EngineDouble(tokens_per_s=20))
    (double,) = fleet.doubles.values()

    async def main() -> None:
        async with pool_of(fleet) as pool:
            await run_call(pool, "first")
            await wait_until(lambda: double.n_running == 0)
            call = asyncio.create_task(run_call(pool, "r"))
            await wait_until(lambda: double.n_running)
            call.cancel()
            await wait_until(lambda: double.n_cancelled == 1 and double.n_running == 0)

    asyncio.run(main())


def test_retry_after_is_respected(stack: ExitStack) -> None:
    fleet = Fleet(stack, EngineDouble(retry_after_s=1.0))
    (double,) = fleet.doubles.values()

    async def main() -> float:
        async with pool_of(fleet) as pool:
            await run_call(pool, "first")
            double.fail_next("429")
            started = time.monotonic()
            await run_call(pool, "r")
            return time.monotonic() - started

    assert asyncio.run(main()) >= 1.0, "it asked for a second"
