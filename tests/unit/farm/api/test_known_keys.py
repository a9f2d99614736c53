"""Keys of the store while it is away: those who wait together are answered together, and none is taken from memory."""

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
    """Answers reads in place of a store, which is away once `is_away`."""

    def __init__(self) -> None:
        self.farm = self
        self.store = self
        self.is_away = False
        self.n_reads = 0

    def read(self, work: Callable[..., Any]) -> None:
        """Is never called: `run` is given it."""

    async def run(self, call: Callable[..., Any], *arguments: Any) -> dict[str, ApiKey]:
        self.n_reads += 1
        # all others have come by then
        await asyncio.sleep(0)
        if self.is_away:
            raise StoreUnavailable("away")
        return {digest_of(TEXT): KEY}


async def _ask(keys: KnownKeys, n: int) -> list[Any]:
    return await asyncio.gather(*(keys.caller(TEXT) for _ in range(n)), return_exceptions=True)


def test_those_who_wait_for_a_store_that_is_away_wait_once(monkeypatch: Any) -> None:
    async def check() -> None:
        endpoints = _Endpoints()
        keys = KnownKeys(endpoints, "own")  # type: ignore[arg-type]
        assert await _ask(keys, 20) == [(caller_of(KEY), 0.0)] * 20
        assert endpoints.n_reads == 1
        endpoints.is_away = True
        monkeypatch.setattr("farm.api.auth._FRESH_S", -1.0)
        for n in range(1, 3):
            assert {type(each) for each in await _ask(keys, 20)} == {StoreUnavailable}, "what is known is too old"
            assert endpoints.n_reads == 1 + n
        assert await keys.caller(b"own") == (Caller("admin"), 0.0)
        endpoints.is_away = False
        assert await _ask(keys, 20) == [(caller_of(KEY), 0.0)] * 20

    asyncio.run(check())
