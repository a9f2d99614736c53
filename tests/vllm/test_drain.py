"""Weight updates of a real vLLM under constant load: none may hang, whatever calls are in flight when it comes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farm.client.local import LocalFarm
from farm.notifications import Signals
from farm.records.engine import PauseMode
from farm.records.request import SamplingParams
from farm.records.trajectory import token_ids
from farm.store import migrations
from farm.store.database import Store
from tests.secret_keys import key_of
from tests.services.engines import routed
from tests.services.farms import until
from tests.vllm.server import RealVllm
from workers.policy.generation import Engine
from workers.policy.routing.pool import EnginePool
from workers.policy.routing.router import RoutingKey, StickyRouter
from workers.process.engine_registry import EngineRegistry

N_CALLS = 30
N_UPDATES = 20
PROMPT = token_ids([5, 9, 11, 70, 71, 72, 100])


@pytest.fixture
def engines(vllm: RealVllm, tmp_path: Path, broker_url: str) -> Iterator[tuple[LocalFarm, list[EnginePool], Any]]:
    """The verbs, and two workers' pools on one event loop, which knows the engine."""
    store, signals = Store(f"sqlite:///{tmp_path}/farm.db"), Signals(broker_url)
    migrations.migrate(store)
    verbs = LocalFarm(store, signals, 1000)
    verbs.add_engine(f"{vllm.url}/v1")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop)

    fleets = [EngineRegistry(store, signals, f"n/run/{number}", key_of(store)) for number in range(2)]
    pools = [EnginePool(fleet, reporter=fleet) for fleet in fleets]
    for fleet, pool in zip(fleets, pools, strict=True):
        fleet.on_change = pool.changed
        fleet.start()
        run(pool.start()).result(30)
    until(lambda: verbs.engines()[0].engine.info is not None, "the engine was asked what it can do", 300)
    yield verbs, pools, run
    for fleet, pool in zip(fleets, pools, strict=True):
        run(pool.aclose()).result(30)
        fleet.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    signals.close()
    store.close()


@pytest.mark.parametrize("mode", ["drain", "keep", "abort"])
def test_updates_with_short_calls_in_flight_all_finish(
    engines: tuple[LocalFarm, list[EnginePool], Any], vllm: RealVllm, mode: PauseMode
) -> None:
    verbs, pools, run = engines
    n_updates = N_UPDATES if mode == "drain" else 5
    stop = threading.Event()
    n_answered = [0] * N_CALLS

    async def ask(engine: Engine) -> None:
        await engine.generate(PROMPT, SamplingParams(), 12)

    async def call_repeatedly(number: int) -> None:
        router = StickyRouter(pools[number % 2], RoutingKey(f"r{number}"))
        while not stop.is_set():
            await routed(router, 12, ask)
            n_answered[number] += 1

    calls = [run(call_repeatedly(number)) for number in range(N_CALLS)]
    try:
        for number in range(n_updates):
            before = sum(n_answered)
            until(lambda before=before: sum(n_answered) > before + N_CALLS, "calls are answered all the time")  # type: ignore[misc]
            with verbs.weight_update(str(number), mode, None, 60.0):
                if mode == "drain":
                    assert vllm.metric("vllm:num_requests_running") == 0
                    assert vllm.metric("vllm:num_requests_waiting") == 0
    finally:
        stop.set()
        for call in calls:
            call.result(60)
    assert verbs.engines()[0].engine.engine_version == str(n_updates - 1)
