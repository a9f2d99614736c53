"""Calls of a scripted engine that last as long as a test needs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2

from workers.testing.engine import ScriptedEngine
from workers.testing.serving import serving

_SOON_S = 120.0
GENERATE = "/inference/v1/generate"
Check = Callable[[httpx2.AsyncClient], Awaitable[None]]


def on(engine: ScriptedEngine, check: Check) -> None:
    """Run a check with a client of a running engine."""

    async def run(url: str) -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=_SOON_S) as client:
            await check(client)

    with serving(engine.app()) as url:
        asyncio.run(run(url))


def endless(n: int = 100_000, **more: Any) -> dict[str, Any]:
    """Return the body of a call that samples n tokens."""
    sampling = {"max_tokens": n, "ignore_eos": True, "logprobs": 0, "seed": 1}
    return {"token_ids": [5, 9, 11], "sampling_params": sampling, **more}


def begin(client: httpx2.AsyncClient, **more: Any) -> asyncio.Task[httpx2.Response]:
    """Start a call of `endless`."""
    return asyncio.create_task(client.post(GENERATE, json=endless(**more)))


async def choice(task: Awaitable[httpx2.Response]) -> dict[str, Any]:
    """Return the only choice of a call's answer."""
    result: dict[str, Any] = (await task).json()["choices"][0]
    return result
