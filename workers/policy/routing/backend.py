"""One engine of the pool in this process: the farm's record of it, its health, its calls in flight, its reports.

The pool itself uses no database, so that a rollout can run without one; `workers.process.engine_registry` implements
the reports.

Its health is an immutable value: each method returns the health after an event. It has no clock and no randomness:
callers pass the event loop's time in seconds, and the jitter by which a delay is multiplied.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

from farm.errors import EngineError
from farm.records.engine import EngineInfo
from farm.records.engine_state import EngineUse, Paused, StoredEngine, is_reserved, serves
from workers.policy.generation import Engine, EngineAddress

_OUT_S = (1.0, 30.0)
"""The first and the longest ejection of a failing engine; the duration doubles each time."""
_BUSY_S = (0.25, 15.0)
"""The same for an engine that is busy and sends no `Retry-After`."""
_MAX_BUSY_S = 120.0
_DOUBLINGS = 16
"""Far above either limit; prevents an overflow of the power after many ejections."""
_SLOW_START_S = 10.0
_FIRST_SHARE = 0.1
_MAX_CALL_FAILURES = 3
_WINDOW = 16
_ALL_ANSWERED = ("",) * _WINDOW
_MIN_CALLS = 8
"""The number of calls from which on the share of failures counts, even with answers in between."""
_MAX_CHECK_FAILURES = 2
OpenEngine: TypeAlias = Callable[[EngineAddress, EngineInfo], Engine]


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """The health of one engine, as seen by this process.

    `since` is the start of its current use, None if before this process began. `reason` is that of its ejection, empty
    while it is in use; `n_ejected` counts all ejections, `n_out` those since it last answered reliably. Failed calls
    and checks are counted consecutively. `last_calls` are the calls since `since`: the rollout id of each failed one,
    an empty string for each answered one.
    """

    since: float | None = None
    reason: str = ""
    ejected_until: float = 0.0
    busy_until: float = 0.0
    n_ejected: int = 0
    n_out: int = 0
    n_busy: int = 0
    n_failed_checks: int = 0
    n_failed_calls: int = 0
    failed_rollouts: frozenset[str] = frozenset()
    last_calls: tuple[str, ...] = ()

    @property
    def is_ejected(self) -> bool:
        return bool(self.reason)

    @property
    def is_suspect(self) -> bool:
        """True if the last health check failed, so that the next is due soon."""
        return self.n_failed_checks > 0

    @property
    def fails_checks(self) -> bool:
        """True if it should be ejected for its health checks: two failed, or one plus a call."""
        return self.n_failed_checks >= _MAX_CHECK_FAILURES or (self.n_failed_checks > 0 and self.n_failed_calls > 0)

    @property
    def failed_calls(self) -> str:
        """The calls for which it should be ejected (several in a row, or half of many); empty if it should not be.

        Failures of a single rollout do not count: one request can fail on every engine.
        """
        if self.n_failed_calls >= _MAX_CALL_FAILURES and len(self.failed_rollouts) > 1:
            return "call after call"
        failed = [each for each in self.last_calls if each]
        n = len(self.last_calls)
        if n >= _MIN_CALLS and 2 * len(failed) >= n and len(set(failed)) > 1:
            return f"{len(failed)} of its last {n} calls"
        return ""

    def share(self, now: float) -> float:
        """Return the share of its speed to count on now: less than 1 while it is new or just readmitted."""
        if self.since is None or now - self.since >= _SLOW_START_S:
            return 1.0
        return _FIRST_SHARE + (1 - _FIRST_SHARE) * max(0.0, now - self.since) / _SLOW_START_S

    def after_answer(self) -> EngineHealth:
        """Return the health after an answered call."""
        if self.last_calls == _ALL_ANSWERED and not (self.n_busy or self.n_out or self.n_failed_checks):
            return self
        last = (*self.last_calls, "")[-_WINDOW:]
        # The ejections of an engine that both answers and fails keep getting longer.
        n_out = 0 if len(last) >= _MIN_CALLS and not any(last) else self.n_out
        return replace(self, n_busy=0, n_out=n_out, last_calls=last)._without_failures()

    def after_failure(self, rollout_id: str) -> EngineHealth:
        """Return the health after a failed call; check `failed_calls` then."""
        return replace(
            self,
            n_failed_calls=self.n_failed_calls + 1,
            failed_rollouts=self.failed_rollouts | {rollout_id},
            last_calls=(*self.last_calls, rollout_id)[-_WINDOW:],
        )

    def after_check(self, is_healthy: bool) -> EngineHealth:
        """Return the health after a health check; check `fails_checks` then."""
        return replace(self, n_failed_checks=0 if is_healthy else self.n_failed_checks + 1)

    def ejected(self, now: float, why: str) -> EngineHealth:
        """Return the health of the ejected engine, or with another reason if it already is."""
        return replace(self, n_ejected=self.n_ejected + (not self.is_ejected), reason=why).ejected_longer(now)

    def ejected_longer(self, now: float) -> EngineHealth:
        """Return the health after a failed attempt to readmit it."""
        out_s = min(_OUT_S[0] * 2 ** min(self.n_out, _DOUBLINGS), _OUT_S[1])
        return replace(self, ejected_until=now + out_s, n_out=self.n_out + 1)

    def readmitted(self, now: float) -> EngineHealth:
        """Return the health of the engine back in use, with a clean record."""
        return replace(self, reason="", since=now, last_calls=())._without_failures()

    def after_refusal(self, now: float, retry_after_s: float | None, jitter: float) -> EngineHealth:
        """Return the health of a busy engine, for `retry_after_s`, else with backoff; simultaneous ones count once."""
        n_busy = self.n_busy + (now >= self.busy_until)
        backoff_s = min(_BUSY_S[0] * 2 ** min(n_busy - 1, _DOUBLINGS), _BUSY_S[1]) * jitter
        wait_s = backoff_s if retry_after_s is None else min(retry_after_s, _MAX_BUSY_S)
        return replace(self, n_busy=n_busy, busy_until=max(self.busy_until, now + wait_s))

    def after_resume(self) -> EngineHealth:
        """Return the health without the busy state, which a pause had caused."""
        return replace(self, busy_until=0.0, n_busy=0)

    def _without_failures(self) -> EngineHealth:
        return replace(self, n_failed_checks=0, n_failed_calls=0, failed_rollouts=frozenset())


class EngineReporter:
    """A worker's reports on engines; this one, of a pool without a store, reports nothing and sends no orders.

    Called on the event loop, so none of the plain methods blocks.
    """

    def report_info(self, url: str, info: EngineInfo) -> None:
        """Report the capabilities of an engine."""

    def report_failure(self, url: str, why: str) -> None:
        """Report the reason for an engine's ejection; empty if it is readmitted."""

    def report(self, in_flight: Mapping[str, EngineUse]) -> None:
        """Report the load of this process by URL; also its heartbeat."""

    async def is_leader(self) -> bool:
        """Return whether only this process may send engines their orders for the next seconds."""
        return False

    async def has_settled(self, url: str, order: int) -> bool:
        """Return whether every live worker follows this order for an engine, and has no call in flight there."""
        return True

    async def report_done(self, url: str, order: int, paused: Paused, version: str) -> None:
        """Report that an engine was sent all orders up to this one, and its resulting pause and version."""


def address_of(record: StoredEngine) -> EngineAddress:
    """Return the address of an engine; servers do not know the model names of training runs."""
    model = "" if is_reserved(record.model) else record.model
    return EngineAddress(record.url, model, record.key, record.tokenizer, record.tool_format)


def record_of(address: EngineAddress, info: EngineInfo | None = None) -> StoredEngine:
    """Return the record of an engine that is in no store; its weights have no version."""
    return StoredEngine(
        address.url,
        address.model,
        address.key,
        tokenizer=address.tokenizer,
        tool_format=address.tool_format,
        info=info,
    )


class CallAborted(EngineError):
    """A call aborted by the pool, to be retried: its engine failed (`died`), or was paused for new weights."""

    def __init__(self, message: str, *, died: bool) -> None:
        super().__init__(message)
        self.died = died


class SharedEngine:
    """A connection to an engine that is shared by calls; once retired, the last call closes it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._n_users = 0
        self._given_up = False
        self._closing: asyncio.Task[None] | None = None

    @contextmanager
    def borrowed(self) -> Iterator[Engine]:
        self._n_users += 1
        try:
            yield self.engine
        finally:
            self._n_users -= 1
            self._close_if_free()

    def retire(self) -> None:
        self._given_up = True
        self._close_if_free()

    def _close_if_free(self) -> None:
        if self._given_up and self._n_users == 0 and self._closing is None:
            self._closing = asyncio.ensure_future(self.engine.aclose())

    async def aclose(self) -> None:
        """Close it now, even while calls use it."""
        self._given_up = True
        if self._closing is None:
            self._closing = asyncio.ensure_future(self.engine.aclose())
        await self._closing


class InFlightCall:
    """One call in flight, which can be aborted. `freeze` gets +1 when its engine freezes it, and -1 afterwards."""

    def __init__(self, freeze: Callable[[int], None]) -> None:
        self.timeout = asyncio.timeout(None)
        self.reason: CallAborted | None = None
        self._freeze = freeze
        self._frozen = False

    def freeze(self, frozen: bool) -> None:
        if frozen != self._frozen:
            self._frozen = frozen
            self._freeze(1 if frozen else -1)

    def abort(self, reason: CallAborted) -> None:
        if self.reason is None:
            self.reason = reason
            self.timeout.reschedule(asyncio.get_running_loop().time())


class Backend:
    """An engine while it is listed."""

    def __init__(self, listed: StoredEngine, engine_health: EngineHealth) -> None:
        self.record = listed
        self.address = address_of(listed)
        self.info = listed.info
        self.is_undetected = listed.info is None
        """True if its capabilities must be detected, for the first time or again."""
        self.health = engine_health
        self.in_flight: set[InFlightCall] = set()
        self.last_answer_at = 0.0
        """The time of its last answer, or of its first call since then."""
        self.cut_at = 0.0
        """The time, on the event loop's clock, since which it has late calls after an abort; 0 if it has none."""
        self.known_pause: Paused = ""
        """The pause mode that this process has set; the record only shows the one that may be in force."""
        self.client: SharedEngine | None = None

    @property
    def url(self) -> str:
        return self.record.url

    @property
    def missing_version(self) -> str:
        """The version of the farm's weights if this engine lacks them, else empty."""
        return self.record.version if self.record.lacks_weights else ""

    @property
    def naming(self) -> bool:
        """True if the server has not been sent the name of its weights: until then samples have no version."""
        return self.record.to_name and self.info is not None and self.info.control

    def serves(self, model: str) -> bool:
        """Return whether it may serve a batch that requests this model, empty for any."""
        return serves(self.record.model, model)

    @property
    def frozen(self) -> bool:
        """True if its calls are blocked until it is resumed."""
        return self.record.paused == "keep" and self.info is not None and self.info.control

    @property
    def has_aborted(self) -> bool:
        """True if it has aborted its calls: any remaining ones came later, and wait for the resume."""
        listed = self.record
        return listed.paused == listed.engine_paused == "abort" and listed.n_done >= listed.n_orders

    def mark_busy(self, now: float, retry_after_s: float | None) -> None:
        """Record a temporary refusal."""
        self.health = self.health.after_refusal(now, retry_after_s, jitter=random.uniform(0.5, 1.0))  # noqa: S311 - no secret

    def silent_s(self, now: float) -> float:
        """Return the seconds for which none of its running calls has been answered; 0 if none runs."""
        return now - self.last_answer_at if self.in_flight else 0.0

    def update(self, listed: StoredEngine) -> bool:
        """Apply the farm's record; return whether the engine's capabilities must be detected again.

        The client is dropped if the address or the capabilities have changed.
        """
        address = address_of(listed)
        moved = address != self.address
        must_probe = listed.info is None and (moved or self.record.info is not None)
        if must_probe:
            self.is_undetected = True
            self.health = replace(self.health, ejected_until=0.0)
        if self.record.paused and not listed.paused:
            self.health = self.health.after_resume()
            self.known_pause = ""
        self.record = listed
        self.address = address
        if moved:
            self.drop_client()
            self.info = None
        if listed.info is not None and listed.info != self.info:
            self.learn(listed.info)
        for call in self.in_flight:
            call.freeze(self.frozen)
        return must_probe

    def learn(self, info: EngineInfo) -> None:
        """Set its capabilities; the client is dropped if they have changed."""
        if info != self.info:
            self.drop_client()
        self.info = info
        self.is_undetected = False

    def open_client(self, open_engine: OpenEngine) -> SharedEngine:
        """Return the client, opened if necessary; needs `info`."""
        if self.client is None:
            assert self.info is not None
            self.client = SharedEngine(open_engine(self.address, self.info))
        return self.client

    def drop_client(self) -> None:
        if self.client is not None:
            self.client.retire()
            self.client = None

    def abort_calls(self, why: str, *, died: bool) -> None:
        """Abort all its calls; they are retried."""
        for call in list(self.in_flight):
            call.abort(CallAborted(f"engine {self.url} {why}", died=died))

    @contextmanager
    def track_call(self, freeze: Callable[[int], None]) -> Iterator[InFlightCall]:
        """Count a call as in flight while the block runs."""
        call = InFlightCall(freeze)
        if not self.in_flight:
            self.last_answer_at = asyncio.get_running_loop().time()
        self.in_flight.add(call)
        try:
            yield call
        finally:
            self.in_flight.discard(call)
            call.freeze(False)
