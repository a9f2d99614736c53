"""The router of one rollout: its choice of engines, its waits and retries, and the conditions to give up.

A call waits as long as an engine may still answer it; the caller's deadline cancels it. Waiting for an engine with the
farm's weights counts against no time limit; after a while the rollout releases its slot (WeightsMissing). Errors that
every engine would give are raised at once (EngineRefused, LimitReached, and any other error of the call); a request
for which one engine is unfit goes to another. A request is given up if it failed on every engine several times, or was
in flight when several engines failed in turn.

A deadline that passes while a call has no answer is attributed to the policy: a whole answer comes at once, and may be
a long one. It is attributed to the engine if most of the rollout's time went into that silence and even the longest
requested answer should take much less, by the speed of the engine's other calls; an engine without any answer so far is
assumed to be slow.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from farm.errors import EngineError, WeightsMissing
from farm.observing.process_log import log_also
from farm.records.engine_state import is_reserved, without_engine
from workers.policy.engines.connection import Progress, watched
from workers.policy.generation import Engine, EngineBusy, EngineRefused, EngineUnfit
from workers.policy.routing.backend import Backend, CallAborted
from workers.policy.routing.load import choose
from workers.policy.routing.pool import EnginePool

T = TypeVar("T")

_BACKOFF_S = (0.2, 5.0)
_DOUBLINGS = 10
_MAX_FAILURES = 3
"""Maximum failures of one call on each engine in use."""
_MAX_DEATHS = 3
"""Number of engines ejected after this call failed there, from which on it counts as the cause."""
_POLL_S = 1.0
_JITTER = 0.1
_SILENT_S = 60.0
_SILENT_SHARE = 0.5


@dataclass(slots=True)
class RetryState:
    """The attempts of one call.

    `last` is the last failure. By URL: `failures` counts failures, `not_before` is the time of the next attempt,
    `unfit` are the engines that cannot answer the call. `lives` are the engines on which it failed, each with the
    number of its previous ejections.
    """

    last: str = ""
    n_failures: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    not_before: dict[str, float] = field(default_factory=dict)
    unfit: set[str] = field(default_factory=set)
    lives: set[tuple[Backend, int]] = field(default_factory=set)

    def note_failure(self, backend: Backend, error: EngineError, now: float, jitter: float) -> None:
        """Record an attempt without an answer; `jitter` multiplies the following pause."""
        self.last = str(error)
        n_ejected = backend.health.n_ejected
        if isinstance(error, CallAborted):
            if error.died:
                self.n_failures += 1
                self.lives.add((backend, n_ejected - 1))
            return
        n = self.failures[backend.url] = self.failures.get(backend.url, 0) + 1
        pause_s = min(_BACKOFF_S[0] * 2 ** min(n - 1, _DOUBLINGS), _BACKOFF_S[1]) * jitter
        self.not_before[backend.url] = now + pause_s
        self.n_failures += 1
        self.lives.add((backend, n_ejected))

    def note_unfit(self, backend: Backend, error: EngineUnfit, now: float) -> None:
        """Record an attempt on an engine that is unfit for this call; another may be fit."""
        self.last = str(error)
        self.unfit.add(backend.url)
        self.not_before[backend.url] = now + _BACKOFF_S[1]

    def unfit_everywhere(self, serving: Sequence[Backend]) -> bool:
        """Return whether every engine is unfit for the call."""
        return all(backend.url in self.unfit for backend in serving)

    def failed_everywhere(self, in_use: Sequence[Backend]) -> bool:
        """Return whether the call has failed `_MAX_FAILURES` times on each engine in use."""
        return bool(in_use) and all(self.failures.get(backend.url, 0) >= _MAX_FAILURES for backend in in_use)

    @property
    def kills_engines(self) -> bool:
        """True if so many engines were ejected after the call failed there that it may be the cause."""
        return sum(backend.health.n_ejected > n_before for backend, n_before in self.lives) >= _MAX_DEATHS


@dataclass(slots=True, eq=False)
class Call:
    """One call of a rollout, which tries engines until one has answered.

    `n_tokens` is its load, `most_answer_tokens` the maximum length of its answer, if known. `began` and `since` are the
    start times of the call and of its current attempt, None before the first; `failure` is that of its last attempt, if
    it failed; `paused_s` is that of its rollout when the current attempt began.
    """

    n_tokens: int
    most_answer_tokens: int | None = None
    began: float | None = None
    since: float = 0.0
    failure: str = ""
    paused_s: float = 0.0
    tries: RetryState = field(default_factory=RetryState)

    @property
    def most_tokens(self) -> int | None:
        """The load of the call with an answer of maximum length; None if unknown."""
        return None if self.most_answer_tokens is None else self.n_tokens + self.most_answer_tokens

    def begin(self, now: float) -> None:
        """Set the times of a call before its first attempt."""
        if self.began is None:
            self.began = self.since = now

    def failed(self, failure: str, now: float) -> None:
        self.failure, self.since = failure, now

    def is_mostly_failed(self, now: float) -> bool:
        """Return whether more of its time went to failed attempts than to the current one."""
        return bool(self.failure) and self.began is not None and now - self.since < self.since - self.began


@dataclass(frozen=True, slots=True)
class RoutingKey:
    """The rollout of a call, its group, whose rollouts share a prompt, and its model; empty for any."""

    rollout_id: str
    group_id: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class _RunningTry:
    backend: Backend
    progress: Progress
    call: Call


class StickyRouter:
    """The router of one rollout, which stays where its prefix is cached. Supports concurrent calls."""

    def __init__(self, pool: EnginePool, routing_key: RoutingKey) -> None:
        self._pool = pool
        self._key = routing_key
        self._url = ""
        self._waits: dict[int, str] = {}
        self._n_waits = 0
        self._began: float | None = None
        self._calls: dict[Call, _RunningTry | None] = {}
        """The current calls, each with its running attempt, if an engine has one."""
        self._n_paused = 0
        self._paused_since = 0.0
        self._paused_s = 0.0

    @property
    def blocked(self) -> str:
        """The reason why a call gets no answer now; empty if it may get one, or only waits for new weights."""
        tries = [running for running in self._calls.values() if running is not None]
        backends = (running.backend for running in tries)
        ejected = (f"engine {backend.url} {_why_out(backend)}" for backend in backends if backend.health.is_ejected)
        # A call whose attempts mostly failed counts as blocked even while a retry runs.
        again = (call.failure for call in self._calls if call.failure and call.is_mostly_failed(self._pool.now()))
        stalled = (f"engine {each.backend.url} {each.progress.stalled}" for each in tries if each.progress.stalled)
        silent = map(self._silent, tries)
        return next((reason for reason in (*self._waits.values(), *ejected, *stalled, *again, *silent) if reason), "")

    def _silent(self, running: _RunningTry) -> str:
        """Return why a call in flight is overdue, by this module's rule; empty if it may be a long answer."""
        backend, call = running.backend, running.call
        if call.most_tokens is None:
            return ""
        now, began = self._pool.now(), self._began or 0.0
        silent_s = min(now - call.since - (self.paused_s - call.paused_s), running.progress.silent_s)
        longest_s = self._pool.longest_s(backend, call.most_tokens)
        in_all_s = now - began - self.paused_s
        if silent_s <= max(_SILENT_S, longest_s, _SILENT_SHARE * in_all_s):
            return ""
        return (
            f"engine {backend.url} has sent nothing for {silent_s:.0f} s, and no answer should take {longest_s:.0f} s"
        )

    @property
    def paused_s(self) -> float:
        """Seconds for which calls of this rollout have been held back for new weights; no time limit counts them."""
        return self._paused_s + (self._pool.now() - self._paused_since if self._n_paused else 0.0)

    @property
    def newest_version(self) -> str:
        """The newest version of the farm's weights; empty on a training run's engines, which name theirs in answers."""
        return "" if is_reserved(self._key.model) else self._pool.newest_version

    @property
    def context_tokens(self) -> int | None:
        """The shortest context of the engines that may answer; None if unknown for all of them."""
        infos = (backend.info for backend in self._serving())
        return min((info.context_tokens for info in infos if info and info.context_tokens), default=None)

    def version_of(self, url: str) -> str:
        """Return the version of the weights last sent to an engine; empty if none was."""
        return self._pool.version_of(url)

    @asynccontextmanager
    async def acquire(self, call: Call) -> AsyncIterator[Engine]:
        """Wait for an engine that can take a call, and yield it for one attempt.

        A retryable error of the block is recorded in the call and suppressed: acquire again, with the same call, until
        the block succeeds. Raises EngineError when the attempts are exhausted, and at once EngineRefused, LimitReached
        and any other error of the block.
        """
        await self._pool.start()
        call.begin(self._pool.now())
        self._began = call.began if self._began is None else self._began
        self._calls[call] = None
        try:
            backend = await self._pick_backend(call)
            log_also(engine=backend.url)
            call.since, call.paused_s = self._pool.now(), self.paused_s
            lent = self._pool.lend(backend, self._key.rollout_id, max(1, call.n_tokens), self._hold)
            try:
                with watched() as progress:
                    self._calls[call] = _RunningTry(backend, progress, call)
                    async with lent as engine:
                        yield engine
            except EngineError as error:
                self._calls[call] = None
                await self._record_failure(call, backend, error)
        finally:
            del self._calls[call]

    async def answer(self, call: Call, ask: Callable[[Engine], Awaitable[T]]) -> T:
        """Return what `ask` returns for an engine: for one after another, until it succeeds. Raises as `acquire`."""
        while True:
            async with self.acquire(call) as engine:
                return await ask(engine)

    async def _record_failure(self, call: Call, backend: Backend, error: EngineError) -> None:
        """Record a failed attempt in its call. Raises the call's final error if no further attempt may help."""
        now = self._pool.now()
        if isinstance(error, EngineUnfit):
            call.tries.note_unfit(backend, error, now)
            if call.tries.unfit_everywhere(self._serving()):
                raise error
        elif isinstance(error, EngineRefused):
            raise error
        elif isinstance(error, EngineBusy):
            call.tries.last = str(error)
            call.failed(call.tries.last, now)
        else:
            call.tries.note_failure(backend, error, now, jitter=random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            if not isinstance(error, CallAborted) or error.died:
                call.failed(call.tries.last, now)
            if await self._should_give_up(call.tries):
                raise EngineError(f"{call.tries.n_failures} tries failed, the last with: {error}") from error

    def _hold(self, n: int) -> None:
        """Add to the number of calls held back for new weights; `n` may be negative."""
        if not self._n_paused:
            self._paused_since = self._pool.now()
        self._n_paused += n
        if not self._n_paused:
            self._paused_s += self._pool.now() - self._paused_since

    async def _should_give_up(self, tries: RetryState) -> bool:
        """Return whether the call keeps failing on healthy engines, or several engines failed because of it."""
        if tries.n_failures > 1:
            # Before it goes to another engine: the call may have caused the last failures.
            await self._pool.check_suspects([backend for backend in self._in_use() if backend.url in tries.failures])
        return tries.kills_engines or tries.failed_everywhere(self._in_use())

    def _in_use(self) -> list[Backend]:
        return [
            backend
            for backend in self._serving()
            if not (backend.record.paused or backend.health.is_ejected or backend.health.is_suspect)
        ]

    def _serving(self) -> list[Backend]:
        return [
            backend
            for backend in self._pool.backends
            if backend.serves(self._key.model) and (backend.record.state == "active" or backend.url == self._url)
        ]

    async def _pick_backend(self, call: Call) -> Backend:
        """Wait for an engine for a call, and return it. Nothing may be awaited between its return and the call."""
        n_tokens, tries = max(1, call.n_tokens), call.tries
        unlisted, away, lacking = _Spell(), _Spell(), _Spell()
        while True:
            self._pool.sync()
            now = self._pool.now()
            serving = self._serving()
            ready = [
                backend for backend in serving if _ready(backend, now) and tries.not_before.get(backend.url, 0.0) <= now
            ]
            if ready:
                group = self._key.group_id or self._key.rollout_id
                self._url = choose(self._pool.candidates(ready), n_tokens, group, self._url)
                return next(backend for backend in ready if backend.url == self._url)
            # A restarted trainer registers the engines of its run again.
            if unlisted.lasts(not serving and not is_reserved(self._key.model), now, self._pool.none_s):
                raise EngineError(without_engine(self._key.model))
            all_out = bool(serving) and all(backend.health.is_ejected for backend in serving)
            if away.lasts(all_out, now, self._pool.away_s):
                raise EngineError(f"no engine after {self._pool.away_s:g} s: {self._why(serving, tries, now)}")
            if lacking.lasts(_lacks_weights(serving), now, self._pool.weights_s):
                raise WeightsMissing(f"no engine has the farm's weights: {self._why(serving, tries, now)}")
            is_held = lacking.holds or any(backend.record.paused or backend.naming for backend in serving)
            with self._waiting("" if is_held else self._why(serving, tries, now), is_held):
                await self._pool.wait_for_change(_poll_delay_s(serving, tries, now))

    @contextmanager
    def _waiting(self, reason: str, is_paused: bool) -> Iterator[None]:
        self._n_waits += 1
        number = self._n_waits
        self._waits[number] = reason
        if is_paused:
            self._hold(1)
        try:
            yield
        finally:
            del self._waits[number]
            if is_paused:
                self._hold(-1)

    def _why(self, serving: Sequence[Backend], tries: RetryState, now: float) -> str:
        if not serving:
            return without_engine(self._key.model)
        return "; ".join(f"engine {backend.url} {_why_not(backend, tries, now)}" for backend in serving[:4])


class _Spell:
    """The duration for which a condition has held without a break."""

    def __init__(self) -> None:
        self._since: float | None = None

    @property
    def holds(self) -> bool:
        return self._since is not None

    def lasts(self, holds: bool, now: float, limit_s: float) -> bool:
        """Record whether the condition holds now; return whether it has held for `limit_s`."""
        self._since = None if not holds else now if self._since is None else self._since
        return self._since is not None and now - self._since >= limit_s


def _lacks_weights(serving: Sequence[Backend]) -> bool:
    """Return whether no engine can take calls until it gets the farm's weights; ejected engines do not count."""
    lacks = [backend.missing_version or backend.naming for backend in serving if not backend.health.is_ejected]
    return bool(lacks) and all(lacks) and not any(backend.record.paused for backend in serving)


def _ready(backend: Backend, now: float) -> bool:
    engine_health = backend.health
    free = backend.info is not None and not engine_health.is_ejected and engine_health.busy_until <= now
    return free and not backend.record.paused and not backend.missing_version and not backend.naming


def _why_not(backend: Backend, tries: RetryState, now: float) -> str:
    if backend.health.is_ejected:
        return _why_out(backend)
    if backend.missing_version:
        return f"does not have the weights {backend.missing_version}: push them and name them, or remove it"
    if backend.naming:
        return f"has not yet been sent its weights' version {backend.record.version}"
    if backend.info is None:
        return "has not been probed yet"
    if backend.health.busy_until > now:
        return f"is busy for {backend.health.busy_until - now:.0f} s more ({tries.last})"
    return f"failed this call: {tries.last}"


def _why_out(backend: Backend) -> str:
    return f"is out: it {backend.health.reason}"


def _poll_delay_s(serving: Sequence[Backend], tries: RetryState, now: float) -> float:
    """Return the seconds until the first of them may be tried again, with jitter to spread the waiting calls."""
    due = [
        max(backend.health.busy_until, tries.not_before.get(backend.url, 0.0))
        for backend in serving
        if not backend.health.is_ejected
    ]
    soonest = min((each for each in due if each > now), default=now + _POLL_S)
    return min(soonest - now, _POLL_S) * (1 + _JITTER * random.random()) + 0.001  # noqa: S311 - no secret
