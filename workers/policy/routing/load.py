"""The load of engines: tokens in flight of all processes, and the speed of each engine.

Every process publishes its own counts under one key that expires within seconds. So the sum corrects itself soon after
a worker was killed, and a Redis outage costs accuracy, not calls: a process then knows only its own load.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import redis

log = logging.getLogger(__name__)

_SMOOTHING = 0.2
"""The weight of the newest call in an engine's speed."""
_SHORTEST_S = 1e-4


@dataclass(frozen=True, slots=True)
class Load:
    """Calls and tokens in flight on an engine."""

    n_calls: int = 0
    n_tokens: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(self.n_calls + other.n_calls, self.n_tokens + other.n_tokens)


IDLE = Load()


class PeerLoads(Protocol):
    """The loads of other processes. No method blocks."""

    def of(self, url: str) -> Load: ...

    def speed(self, url: str) -> float | None:
        """Return the speed measured by others, as `EngineSpeed` defines it; None if there is none."""
        ...

    def changed(self) -> None:
        """Publish the own counts soon, after a change."""
        ...


class NoPeerLoads:
    """The loads without Redis: none is known."""

    def of(self, url: str) -> Load:
        return IDLE

    def speed(self, url: str) -> float | None:
        return None

    def changed(self) -> None: ...


class EngineSpeed:
    """The speed of an engine: tokens/s of a call, times the square root of the number of calls in flight, smoothed.

    A fully loaded engine shares its tokens/s among its calls; one with room gives each call the same. It is unknown
    which case holds. The square root lies in between, and makes a choice by tokens in flight over speed stable for
    both: by the tokens/s of one call, the former would starve; by their sum, the latter would be fed without end.
    """

    def __init__(self) -> None:
        self.value: float | None = None

    def measured(self, n_tokens: int, seconds: float, n_calls: float) -> None:
        sample = float(n_tokens / max(seconds, _SHORTEST_S) * max(n_calls, 1.0) ** 0.5)
        self.value = sample if self.value is None else self.value + _SMOOTHING * (sample - self.value)


class LoadTracker:
    """The counts of this process by URL, and those of others if known. Changed on the event loop only."""

    def __init__(self, others: PeerLoads | None = None) -> None:
        self._others = others or NoPeerLoads()
        self._own: dict[str, Load] = {}
        self._speeds: defaultdict[str, EngineSpeed] = defaultdict(EngineSpeed)

    @contextmanager
    def taken(self, url: str, n_tokens: int) -> Iterator[None]:
        """Count a call while the block runs, however it ends."""
        self._own[url] = self.own(url) + Load(1, n_tokens)
        self._others.changed()
        try:
            yield
        finally:
            left = self.own(url) + Load(-1, -n_tokens)
            if left.n_calls:
                self._own[url] = left
            else:
                del self._own[url]
            self._others.changed()

    def own(self, url: str) -> Load:
        return self._own.get(url, IDLE)

    def of(self, url: str) -> Load:
        """Return the load of all processes there."""
        return self.own(url) + self._others.of(url)

    def measured(self, url: str, n_tokens: int, seconds: float, n_calls: float) -> None:
        """Record the speed of an answered call, while about `n_calls` ran there."""
        self._speeds[url].measured(n_tokens, seconds, n_calls)

    def speed(self, url: str) -> float | None:
        """Return the speed measured by this process, else by others; None if there is none."""
        return self._speeds[url].value or self._others.speed(url)

    def forget(self, url: str) -> None:
        self._speeds.pop(url, None)

    def snapshot(self) -> dict[str, tuple[int, int, float | None]]:
        """Return (calls, tokens, own speed) by URL, for publishing. Thread-safe."""
        loads = dict(self._own)
        speeds = {url: speed.value for url, speed in dict(self._speeds).items() if speed.value is not None}
        return {
            url: (loads.get(url, IDLE).n_calls, loads.get(url, IDLE).n_tokens, speeds.get(url))
            for url in {*loads, *speeds}
        }


class SharedLoads:
    """Publishes this process's counts to Redis and reads the others', in a separate thread, until closed."""

    KEY = "farm:load:"
    OWNERS = "farm:loads"

    def __init__(
        self, client: redis.Redis, owner: str, *, every_s: float = 0.1, beat_s: float = 1.0, expires_s: float = 4.0
    ) -> None:
        self._redis = client
        self._owner = owner
        self._every_s = every_s
        self._beat_s = beat_s
        self._expires_ms = int(expires_s * 1000)
        self._others: Mapping[str, Load] = {}
        self._speeds: Mapping[str, float] = {}
        self._due = threading.Event()
        self._closed = threading.Event()
        self._load_tracker: LoadTracker | None = None
        self._thread = threading.Thread(target=self._run, name="loads", daemon=True)

    def start(self, load_tracker: LoadTracker) -> None:
        self._load_tracker = load_tracker
        self._thread.start()

    def of(self, url: str) -> Load:
        return self._others.get(url, IDLE)

    def speed(self, url: str) -> float | None:
        return self._speeds.get(url)

    def changed(self) -> None:
        self._due.set()

    def close(self) -> None:
        self._closed.set()
        self._due.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._due.wait(self._beat_s)
            self._due.clear()
            self._exchange()
            self._closed.wait(self._every_s)
        self._withdraw()

    def _exchange(self) -> None:
        """Publish own counts and read those of all processes, in one round trip."""
        assert self._load_tracker is not None
        try:
            own = json.dumps(self._load_tracker.snapshot())
            pipe = self._redis.pipeline(transaction=False)
            pipe.set(self.KEY + self._owner, own, px=self._expires_ms)
            pipe.sadd(self.OWNERS, self._owner)
            pipe.sort(self.OWNERS, by="nosort", get=["#", self.KEY + "*"])
            result = pipe.execute()[-1]
            self._take(dict(zip(result[::2], result[1::2], strict=True)))
        except (redis.RedisError, OSError, ValueError, TypeError, RuntimeError) as error:
            self._others, self._speeds = {}, {}
            log.debug("Loads of other workers are unknown: %s", error)

    def _take(self, found: dict[bytes, bytes | None]) -> None:
        if gone := [owner for owner, counts in found.items() if counts is None]:
            self._redis.srem(self.OWNERS, *gone)
        loads: defaultdict[str, Load] = defaultdict(Load)
        speeds: defaultdict[str, list[float]] = defaultdict(list)
        for owner, counts in found.items():
            if counts is None or owner.decode() == self._owner:
                continue
            for url, (n_calls, n_tokens, speed) in json.loads(counts).items():
                loads[url] += Load(n_calls, n_tokens)
                if speed is not None:
                    speeds[url].append(speed)
        self._others = dict(loads)
        self._speeds = {url: sum(each) / len(each) for url, each in speeds.items()}

    def _withdraw(self) -> None:
        try:
            self._redis.delete(self.KEY + self._owner)
            self._redis.srem(self.OWNERS, self._owner)
        except (redis.RedisError, OSError) as error:
            log.debug("Load of this worker not cleared; it expires soon: %s", error)
