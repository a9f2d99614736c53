"""One rollout's way to the engines: where it plays, why it waits, and when it gives up.

A call waits for as long as there is hope: the deadline is outside, and cancels it. What passes at once is what no
engine would answer otherwise (EngineRefused, LimitReached, and whatever else the call raises); what one is unfit for,
another is asked. A request that every engine failed several times is given up, and so is one that was in flight when
engine after engine died.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from farm.errors import EngineError
from workers.policy.choice import choose
from workers.policy.generation import Engine, EngineBusy, EngineRefused, EngineUnfit
from workers.policy.place import CutOff, Place
from workers.policy.tries import Tries

if TYPE_CHECKING:
    from workers.policy.pool import EnginePool

T = TypeVar("T")
_POLL_S = 1.0
_JITTER = 0.1


@dataclass(frozen=True, slots=True)
class Wish:
    """Who calls, and for which model; empty takes any. Rollouts of a group share a prompt."""

    rollout_id: str
    group_id: str = ""
    model: str = ""


@dataclass(slots=True, eq=False)
class _Call:
    """A call that is being made: when it began, since when the current try runs, and how the last one ended, if any."""

    began: float
    since: float
    failure: str = ""

    def failed(self, failure: str, now: float) -> None:
        self.failure, self.since = failure, now

    def mostly_lost(self, now: float) -> bool:
        """Whether more of its time went to tries that failed than to the one that runs."""
        return bool(self.failure) and now - self.since < self.since - self.began


class Seat:
    """One rollout's way to the engines: it stays where its prefix is cached. Several calls may be made at a time."""

    def __init__(self, pool: EnginePool, wish: Wish) -> None:
        self._pool = pool
        self._wish = wish
        self._url = ""
        self._waits: dict[int, str] = {}
        self._n_waits = 0
        self._playing: list[Place] = []
        self._calls: list[_Call] = []
        self._n_paused = 0
        self._paused_since = 0.0
        self._paused_s = 0.0

    @property
    def blocked(self) -> str:
        """Why a call gets no answer now; empty if it may get one, or waits for new weights alone."""
        deaf = (f"engine {place.url} {_why_out(place)}" for place in self._playing if place.standing.out)
        # one that is busy for everybody does not answer by being asked once more at the very moment
        again = (call.failure for call in self._calls if call.failure and call.mostly_lost(self._pool.now()))
        return next((reason for reason in (*self._waits.values(), *deaf, *again) if reason), "")

    @property
    def paused_s(self) -> float:
        """For how long calls of this rollout have been held back for new weights: nobody's fault, so no clock's."""
        return self._paused_s + (self._pool.now() - self._paused_since if self._n_paused else 0.0)

    @property
    def newest_version(self) -> str:
        return self._pool.newest_version

    def version_of(self, url: str) -> str:
        """The weights that an engine was told it has; empty if it was told none."""
        return self._pool.version_of(url)

    async def call(self, n_tokens: int, ask: Callable[[Engine], Awaitable[T]]) -> T:
        """Make a call that is worth `n_tokens` to an engine, on whichever can take it, as often as it must be made.

        Raises EngineError when there is no hope, and at once EngineRefused, LimitReached and what else `ask` raises.
        """
        await self._pool.start()
        call = _Call(self._pool.now(), self._pool.now())
        self._calls.append(call)
        try:
            return await self._called(call, max(1, n_tokens), ask)
        finally:
            self._calls.remove(call)

    async def _called(self, call: _Call, n_tokens: int, ask: Callable[[Engine], Awaitable[T]]) -> T:
        tries = Tries()
        while True:
            place = await self._place(n_tokens, tries)
            call.since = self._pool.now()
            try:
                return await self._played(place, n_tokens, ask)
            except EngineUnfit as error:
                tries.unfit(place, error, self._pool.now())
                if tries.unfit_everywhere(self._serving()):
                    raise
            except EngineRefused:
                raise
            except EngineBusy as busy:
                tries.last = str(busy)
                call.failed(tries.last, self._pool.now())
            except EngineError as error:
                tries.failed(place, error, self._pool.now())
                if not isinstance(error, CutOff) or error.died:
                    call.failed(tries.last, self._pool.now())
                if await self._hopeless(tries):
                    raise EngineError(f"{tries.n_failures} tries failed, the last with: {error}") from error

    async def _played(self, place: Place, n_tokens: int, ask: Callable[[Engine], Awaitable[T]]) -> T:
        self._playing.append(place)
        try:
            return await self._pool.play(place, self._wish, n_tokens, ask, self._hold)
        finally:
            self._playing.remove(place)

    def _hold(self, n: int) -> None:
        """So many more calls, or less, are held back for new weights."""
        if not self._n_paused:
            self._paused_since = self._pool.now()
        self._n_paused += n
        if not self._n_paused:
            self._paused_s += self._pool.now() - self._paused_since

    async def _hopeless(self, tries: Tries) -> bool:
        """Whether engines that are well fail the call again and again, or engine after engine dies of it."""
        if tries.n_failures > 1:
            # before yet another is asked: the call may be what killed the last ones
            await self._pool.doubted([place for place in self._in_use() if tries.failed_on(place)])
        return tries.deadly or tries.failed_everywhere(self._in_use())

    def _in_use(self) -> list[Place]:
        standings = ((place, place.standing) for place in self._serving() if not place.listed.paused)
        return [place for place, standing in standings if not (standing.out or standing.doubtful)]

    def _serving(self) -> list[Place]:
        """Engines of the model that this rollout may play on, now or later."""
        return [
            place
            for place in self._pool.places
            if place.serves(self._wish.model) and (place.listed.state == "active" or place.url == self._url)
        ]

    async def _place(self, n_tokens: int, tries: Tries) -> Place:
        """The engine for a call, once there is one. From its return to the call, nothing may wait."""
        listless_since: float | None = None
        while True:
            self._pool.sync()
            now = self._pool.now()
            serving = self._serving()
            ready = [place for place in serving if _ready(place, now) and tries.may_ask(place.url, now)]
            if ready:
                group = self._wish.group_id or self._wish.rollout_id
                self._url = choose(self._pool.candidates(ready), n_tokens, group, self._url)
                return next(place for place in ready if place.url == self._url)
            if serving:
                listless_since = None
            elif listless_since is None:
                listless_since = now
            elif now - listless_since >= self._pool.none_s:
                raise EngineError(self._none())
            is_paused = any(place.listed.paused for place in serving)
            with self._waiting("" if is_paused else self._why(serving, tries, now), is_paused):
                await self._pool.news(_nap(serving, tries, now))

    @contextlib.contextmanager
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

    def _none(self) -> str:
        return f"no engine serves {self._wish.model or 'any model'}: `farm engines add` one"

    def _why(self, serving: Sequence[Place], tries: Tries, now: float) -> str:
        if not serving:
            return self._none()
        return "; ".join(f"engine {place.url} {_why_not(place, tries, now)}" for place in serving[:4])


def _ready(place: Place, now: float) -> bool:
    standing = place.standing
    free = place.info is not None and not standing.out and standing.busy_until <= now
    return free and not place.listed.paused and not place.missed


def _why_not(place: Place, tries: Tries, now: float) -> str:
    if place.standing.out:
        return _why_out(place)
    if place.missed:
        return f"does not have the weights {place.missed}: push them and name them, or remove it"
    if place.info is None:
        return "has not been asked yet what it can do"
    if place.standing.busy_until > now:
        return f"is busy for {place.standing.busy_until - now:.0f} s more ({tries.last})"
    return f"failed this call: {tries.last}"


def _why_out(place: Place) -> str:
    return f"is out: it {place.standing.why}"


def _nap(serving: Sequence[Place], tries: Tries, now: float) -> float:
    """Until the first of them may be asked again, and a little more, so that not all who wait come at once."""
    due = [max(place.standing.busy_until, tries.not_before(place.url)) for place in serving if not place.standing.out]
    soonest = min((each for each in due if each > now), default=now + _POLL_S)
    return min(soonest - now, _POLL_S) * (1 + _JITTER * random.random()) + 0.001  # noqa: S311 - no secret
