"""The load of engines, the speed of each, and the choice of one for a call.

Every process publishes its own counts under one key that expires within seconds. So the sum corrects itself soon after
a worker was killed, and a Redis outage costs accuracy, not calls: a process then knows only its own load.

The choice is a pure function of load, speed, and the engine that the rollout already uses. Its measure is the expected
wait: tokens in flight including this call, divided by the engine's speed. A rollout stays where its prefix is cached. A
new one goes to the engine that rendezvous hashing assigns to its group, the same on every node, so that siblings share
their prompt's prefix (Thaler and Ravishankar 1998). Both rules yield when that engine has clearly more load than
another, as in consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2016).
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import redis

log = logging.getLogger(__name__)

_SMOOTHING = 0.2
"""The weight of the newest call in an engine's speed."""
_SHORTEST_S = 1e-4
_JOIN = 1.5
"""A group's engine is chosen unless its wait is more than this many times the shortest."""
_STAY = 3.0
"""A rollout stays unless its engine's wait is more than this many times the shortest: moving costs its cache."""
_ROOM_CALLS = 8
"""An engine with less load than this many such calls has room: its wait does not exclude it."""
_FAST_ENOUGH = 0.5
"""The share of the fastest engine's speed below which even an engine with room is excluded."""


@dataclass(frozen=True, slots=True)
class Load:
    """Calls and tokens in flight on an engine."""

    n_calls: int = 0
    n_tokens: int = 0

    def __add__(self, other: Load) -> Load:
        return Load(self.n_calls + other.n_calls, self.n_tokens + other.n_tokens)


IDLE = Load()


class PeerLoads:
    """The loads of other processes; here, without Redis, none is known. No method blocks."""

    def of(self, url: str) -> Load:
        return IDLE

    def speed(self, url: str) -> float | None:
        """Return the speed measured by others, as LoadTracker defines it; None if there is none."""
        return None

    def changed(self) -> None:
        """Publish the own counts soon, after a change."""


class LoadTracker:
    """The counts of this process by URL, and those of others if known. Changed on the event loop only.

    The speed of an engine is the tokens/s of a call, times the square root of the number of calls in flight, smoothed.
    A fully loaded engine shares its tokens/s among its calls; one with room gives each call the same. It is unknown
    which case holds. The square root lies in between, and makes a choice by tokens in flight over speed stable for
    both: by the tokens/s of one call, the former would starve; by their sum, the latter would be fed without end.
    """

    def __init__(self, others: PeerLoads | None = None) -> None:
        self._others = others or PeerLoads()
        self._own: dict[str, Load] = {}
        self._speeds: dict[str, float] = {}

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
        sample = n_tokens / max(seconds, _SHORTEST_S) * max(n_calls, 1.0) ** 0.5
        known = self._speeds.get(url, sample)
        self._speeds[url] = known + _SMOOTHING * (sample - known)

    def speed(self, url: str) -> float | None:
        """Return the speed measured by this process, else by others; None if there is none."""
        return self._speeds.get(url) or self._others.speed(url)

    def forget(self, url: str) -> None:
        self._speeds.pop(url, None)

    def snapshot(self) -> dict[str, tuple[int, int, float | None]]:
        """Return (calls, tokens, own speed) by URL, for publishing. Thread-safe."""
        loads = dict(self._own)
        speeds = dict(self._speeds)
        return {
            url: (loads.get(url, IDLE).n_calls, loads.get(url, IDLE).n_tokens, speeds.get(url))
            for url in {*loads, *speeds}
        }


class SharedLoads(PeerLoads):
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
        assert self._load_tracker is not None
        try:
            own = json.dumps(self._load_tracker.snapshot())
            pipe = self._redis.pipeline(transaction=False)
            pipe.set(self.KEY + self._owner, own, px=self._expires_ms)
            pipe.sadd(self.OWNERS, self._owner)
            pipe.sort(self.OWNERS, by="nosort", get=["#", self.KEY + "*"])
            reply = pipe.execute()[-1]
            self._take(dict(zip(reply[::2], reply[1::2], strict=True)))
        except (redis.RedisError, OSError, ValueError, TypeError, RuntimeError) as error:
            self._others, self._speeds = {}, {}
            log.debug("Loads of other workers are unknown: %s", error)

    def _take(self, counts_by_owner: dict[bytes, bytes | None]) -> None:
        if expired := [owner for owner, counts in counts_by_owner.items() if counts is None]:
            self._redis.srem(self.OWNERS, *expired)
        loads: defaultdict[str, Load] = defaultdict(Load)
        speeds: defaultdict[str, list[float]] = defaultdict(list)
        for owner, counts in counts_by_owner.items():
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


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that could take a call now. `speed` is that of `workers.policy.routing.load`, less in a slow start."""

    url: str
    n_tokens: int
    speed: float


def choose(candidates: Sequence[Candidate], n_tokens: int, group: str, stay: str = "") -> str:
    """Return the URL of the engine for a call of `n_tokens`. Needs at least one candidate.

    `group` names the rollouts that share a prefix; `stay` is the URL that the rollout already uses.
    """
    best = min(_waiting(each, n_tokens) for each in candidates)
    fastest = max(each.speed for each in candidates)
    for each in candidates:
        if each.url == stay and _will_do(each, n_tokens, best * _STAY, fastest):
            return stay
    for each in sorted(candidates, key=lambda each: _rank(group, each.url), reverse=True):
        if _will_do(each, n_tokens, best * _JOIN, fastest):
            return each.url
    raise AssertionError("the best one will do")


def _waiting(each: Candidate, n_tokens: int) -> float:
    return (each.n_tokens + n_tokens) / each.speed


def _will_do(each: Candidate, n_tokens: int, longest: float, fastest: float) -> bool:
    if _waiting(each, n_tokens) <= longest:
        return True
    return each.n_tokens < _ROOM_CALLS * n_tokens and each.speed >= _FAST_ENOUGH * fastest


def _rank(group: str, url: str) -> bytes:
    return hashlib.blake2b(f"{group}\n{url}".encode(), digest_size=8).digest()
