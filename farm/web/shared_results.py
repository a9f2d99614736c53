"""Results that all viewers share for a moment, so that many viewers cost no more than one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_MOST = 200
"""Results of one kind that are kept."""
_SHARE = 50
"""A result is kept for so many times as long as it took, at least: each costs 2 % of a processor at most."""


class SharedResults(Generic[T]):
    """Results by key, each kept for `kept_s` or longer; concurrent requests wait for one computation."""

    def __init__(self, kept_s: float) -> None:
        self._kept_s = kept_s
        self._kept: dict[Any, tuple[float, T]] = {}
        self._locks: dict[Any, asyncio.Lock] = {}

    async def get(self, key: Any, make: Callable[[], Awaitable[T]], is_final: Callable[[T], bool] | None = None) -> T:
        """Return the kept result of a key, or compute it; one that `is_final` is kept thirty times as long."""
        if (kept := self._fresh(key)) is not None:
            return kept[1]
        lock = self._locks.setdefault(key, asyncio.Lock())
        try:
            async with lock:
                if (kept := self._fresh(key)) is not None:
                    return kept[1]
                started = time.monotonic()
                result = await make()
                now = time.monotonic()
                kept_s = max(self._kept_s, _SHARE * (now - started))
                if is_final is not None and is_final(result):
                    kept_s = max(kept_s, 30 * self._kept_s)
                if len(self._kept) >= _MOST:
                    self._kept.clear()
                self._kept[key] = (now + kept_s, result)
                return result
        finally:
            if not lock.locked():
                self._locks.pop(key, None)

    def _fresh(self, key: Any) -> tuple[float, T] | None:
        kept = self._kept.get(key)
        return kept if kept is not None and kept[0] > time.monotonic() else None
