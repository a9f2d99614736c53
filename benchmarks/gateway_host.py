"""A process that serves the gateways of many rollouts, as a run worker does, without a store.

    python -m benchmarks.gateway_host ENGINE N

It prints the N addresses, without `/v1`, as one line of JSON once all of them listen.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from contextlib import AsyncExitStack

from farm.records.request import Limits, SamplingParams
from farm.records.trajectory import ModelCall
from farm.startup import frozen_imports, limit_full_collections
from workers.plugins.interfaces import AgentContext, Artefact
from workers.policy.engines import detect
from workers.policy.gateway.app import gateway
from workers.policy.gateway.calls import GatewayCalls
from workers.policy.generation import EngineAddress
from workers.policy.policy import RolloutPolicy
from workers.policy.routing.backend import record_of
from workers.policy.routing.pool import EnginePool
from workers.policy.routing.router import RoutingKey, StickyRouter

_LIMITS = Limits(max_turns=1_000_000, max_tokens=1_000_000_000)


async def serve_gateways(engine_url: str, n: int) -> None:
    """Serve until a signal ends it."""
    address = EngineAddress(engine_url)
    engines = (record_of(address, await detect(address)),)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with AsyncExitStack() as stack:
        pool = EnginePool(lambda: engines)
        stack.push_async_callback(pool.aclose)
        addresses = [await stack.enter_async_context(gateway(_calls(pool, i), tcp=True)) for i in range(n)]
        print(json.dumps([each.url.removesuffix("/v1") for each in addresses]), flush=True)
        await ended.wait()


def _calls(pool: EnginePool, index: int) -> GatewayCalls:
    name = f"bench-{index}"
    return GatewayCalls(
        AgentContext(
            rollout_id=name,
            messages=[],
            tools={},
            policy=RolloutPolicy(StickyRouter(pool, RoutingKey(name)), name),
            sampling=SamplingParams(temperature=1.0),
            limits=_LIMITS,
            record=_forget,
            keep=_keep_nothing,
        )
    )


async def _forget(call: ModelCall) -> None:
    """Record nothing: the cost of the store is measured by `benchmarks.farm`."""


async def _keep_nothing(index: int, artefact: Artefact) -> str:
    return ""


if __name__ == "__main__":
    with frozen_imports():  # as a worker does; its imports are above
        pass
    limit_full_collections()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve_gateways(sys.argv[1], int(sys.argv[2])))
