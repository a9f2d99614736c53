"""API keys during a store outage: waiting callers are answered together, and no key is answered from memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from farm.api.auth import KnownKeys
from farm.callers import ApiKey, Caller, Scope, caller_of
from farm.errors import StoreUnavailable
from farm.store.access.api_keys import digest_of

TEXT = b"rf-of-one"
KEY = ApiKey("one", (Scope.READ,))


class _Endpoints:
    """Answers reads in place of a store, which is unavailable once `is_away` is set."""

    def __init__(self) -> None:
        self.farm = self
        self.store = self
        self.is_away = False
        self.n_reads = 0

    def read(self, work: Callable[..., Any]) -> None:
        """Never called: `run` takes it as an argument."""

    async def run(self, call: Callable[..., Any], *arguments: Any) -> dict[str, ApiKey]:
        self.n_reads += 1
        # all others have arrived by then
        await asyncio.sleep(0)
        if self.is_away:
            raise StoreUnavailable("away")
        return {digest_of(TEXT): KEY}


async def _ask(keys: KnownKeys, n: int) -> list[Any]:
    return await asyncio.gather(*(keys.caller(TEXT) for _ in range(n)), return_exceptions=True)


def test_callers_during_an_outage_wait_for_one_read(monkeypatch: Any) -> None:
    async def check() -> None:
        endpoints = _Endpoints()
        keys = KnownKeys(endpoints, "own")  # type: ignore[arg-type]
        assert await _ask(keys, 20) == [(caller_of(KEY), 0.0)] * 20
        assert endpoints.n_reads == 1
        endpoints.is_away = True
        monkeypatch.setattr("farm.api.auth._FRESH_S", -1.0)
        for n in range(1, 3):
            assert {type(each) for each in await _ask(keys, 20)} == {StoreUnavailable}, "the known key is too old"
            assert endpoints.n_reads == 1 + n
        assert await keys.caller(b"own") == (Caller("admin"), 0.0)
        endpoints.is_away = False
        assert await _ask(keys, 20) == [(caller_of(KEY), 0.0)] * 20

    asyncio.run(check())
