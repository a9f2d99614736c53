"""Watches the engines of a worker process: asks new ones what they can do, all whether they are well, and gives orders.

Every process watches for itself, as an engine may be out of reach for one node alone. Orders (pause, resume, name the
weights) are given by one process of the farm; the others only hold their calls back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

from farm.engine import EngineInfo
from farm.errors import EngineError
from workers.policy.generation import EngineAddress, EngineBusy
from workers.policy.listed import Ledger
from workers.policy.orders import carry_out
from workers.policy.place import Client, Place

log = logging.getLogger(__name__)

Detect: TypeAlias = Callable[[EngineAddress, float], Awaitable[EngineInfo]]

_TICK_S = 0.5
_BEAT_S = 4.0
_STORE_S = 2.0
_AGAIN_S = 0.5
"""An engine that did not answer once is asked again after this."""
_DETECT_S = (1.0, 30.0)
_DOUBLINGS = 10
"""So often at most: an engine may be away for days."""
_ANSWER_S = (10.0, 80.0)
"""What it may take for an answer when it is asked what it can do; while that is not known, twice as long each time.

It may be slow, and no worse: a large model on a processor, or one with a queue before it.
"""
_ORDER_S = (1.0, 10.0)
_SILENT_S = 15.0
"""One that answered none of its calls for this long is asked to sample a token: it may be well, and hang."""
_DEAF_S = 300.0
"""If it cannot do that either, and was silent for this long, its calls are made elsewhere, where there is an elsewhere.

One that is full can be silent for long, too, and would have worked for nothing. Its calls are blocked until it answers.
"""


class Watched(Protocol):
    """What the monitor needs of the pool."""

    ledger: Ledger

    @property
    def places(self) -> Sequence[Place]: ...
    def client(self, place: Place) -> Client: ...
    def eject(self, place: Place, why: str) -> None: ...
    def report(self) -> None: ...
    def wake(self) -> None: ...


class Monitor:
    """One task, and one more for each engine that is being asked something."""

    def __init__(self, pool: Watched, detect: Detect, check_s: float) -> None:
        self._pool = pool
        self._detect = detect
        self._check_s = check_s
        self._task: asyncio.Task[None] | None = None
        self._jobs: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._orders: dict[str, int] = {}
        self._due: dict[str, float] = {}
        self._n_detections: dict[str, int] = {}
        self._beat_due = 0.0
        self._news = asyncio.Event()

    def start(self) -> None:
        self._news = asyncio.Event()
        self._jobs = {}
        self._due = {}
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        tasks = [*self._jobs.values(), *([self._task] if self._task is not None else [])]
        self._task = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def look(self) -> None:
        """Something changed."""
        self._news.set()

    def doubt(self, place: Place) -> None:
        """A call failed there, or it is another one now: ask at once how it is."""
        self._due[place.url] = 0.0
        self.look()

    def forget(self, url: str) -> None:
        """It is not listed any more: what is asked of it is of no use, nor is what is known of it."""
        for key in [key for key in self._jobs if key[1] == url]:
            self._jobs.pop(key).cancel()
        self._due.pop(url, None)
        self._n_detections.pop(url, None)

    async def _run(self) -> None:
        while True:
            try:
                self._tend_all()
            except Exception:
                log.exception("watching the engines was interrupted; it goes on")
            self._news.clear()
            # not wait_for: that of Python 3.11 loses a cancellation that comes with the news
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._news.wait()

    def _tend_all(self) -> None:
        now = asyncio.get_running_loop().time()
        for place in self._pool.places:
            self._tend(place, now)
        if now >= self._beat_due:
            self._beat_due = now + _BEAT_S
            self._pool.report()
            if any(kind == "order" for kind, _ in self._jobs):
                self._begin("lead", "", self._lead())

    def _tend(self, place: Place, now: float) -> None:
        if place.listed.n_done < place.listed.n_orders:
            self._order(place)
        if place.listed.paused:
            place.heard_at = now
        elif place.silent_s(now) > _SILENT_S:
            # it may be well and do nothing all the same: have it sample
            place.unasked = True
        if now < max(self._due.get(place.url, 0.0), place.standing.out_until if place.standing.out else 0.0):
            return
        if place.listed.paused and place.info is not None:
            # it may answer nothing at all
            return
        look = self._find_out if place.unasked else self.check
        self._begin("look", place.url, look(place))

    def _begin(self, kind: str, url: str, job: Coroutine[Any, Any, None]) -> None:
        """Run a job unless one of its kind runs for that engine."""
        key = (kind, url)
        if key in self._jobs:
            job.close()
            return
        task = asyncio.get_running_loop().create_task(job)
        self._jobs[key] = task
        task.add_done_callback(lambda done: self._ended(key, done))

    def _ended(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        if self._jobs.get(key) is task:
            del self._jobs[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("engine %s could not be looked after: %r", key[1], error, exc_info=error)
            self._due[key[1]] = asyncio.get_running_loop().time() + self._check_s

    async def _find_out(self, place: Place) -> None:
        """Ask an engine what it can do."""
        url, loop = place.url, asyncio.get_running_loop()
        try:
            info = await self._detect(place.listed.address, self._patience_s(place))
        except EngineError as error:
            self._not_found_out(place, error, loop.time())
            return
        place.heard_at = loop.time()
        self._n_detections.pop(url, None)
        self._due[url] = loop.time() + self._check_s
        place.learn(info)
        self._pool.ledger.found(url, info)
        if place.standing.out:
            place.standing.bring_back(loop.time())
        self._pool.wake()

    def _patience_s(self, place: Place) -> float:
        first_s, longest_s = _ANSWER_S
        n_failed = self._n_detections.get(place.url, 0) if place.info is None else 0
        return min(first_s * 2.0 ** min(n_failed, _DOUBLINGS), longest_s)

    def _not_found_out(self, place: Place, error: EngineError, now: float) -> None:
        url = place.url
        n = self._n_detections[url] = self._n_detections.get(url, 0) + 1
        self._due[url] = now + min(_DETECT_S[0] * 2.0 ** min(n - 1, _DOUBLINGS), _DETECT_S[1])
        if isinstance(error, EngineBusy) and place.info is not None:
            # it was found out before, and may have its hands full
            place.standing.busy(now, error.retry_after_s)
            return
        place.standing.eject(now, f"cannot be asked what it can do: {error}")
        self._pool.ledger.failing(url, place.standing.why)
        others = (other for other in self._pool.places if other is not place)
        if place.silent_s(now) > _DEAF_S and any(not (each.standing.out or each.listed.paused) for each in others):
            place.cut(f"has answered nothing for {place.silent_s(now):.0f} s", died=True)
        self._pool.wake()

    async def check(self, place: Place) -> None:
        """Ask an engine how it is, and put it out of use or back accordingly."""
        loop, standing = asyncio.get_running_loop(), place.standing
        # what fails from here on is news that this check does not have
        self._due[place.url] = loop.time() + self._check_s * random.uniform(0.75, 1.25)  # noqa: S311 - no secret
        with self._pool.client(place).used() as engine:
            well = await engine.healthy()
            if well and (standing.out or standing.failing):
                await self._see_weights(place)
        if standing.out:
            if well:
                standing.bring_back(loop.time())
                self._pool.ledger.failing(place.url, "")
                self._pool.wake()
            else:
                standing.stay_out(loop.time())
        elif standing.checked(well):
            self._pool.eject(place, "does not answer")
        elif standing.doubtful:
            self._due[place.url] = loop.time() + _AGAIN_S
        elif place.listed.failure:
            self._pool.ledger.failing(place.url, "")

    async def _see_weights(self, place: Place) -> None:
        """An engine that was gone may have been started anew, with the weights it began with."""
        listed = place.listed
        if not listed.engine_version or place.info is None or not place.info.control:
            return
        with self._pool.client(place).used() as engine, contextlib.suppress(EngineError):
            version = await engine.version()
            if version and version != listed.engine_version:
                place.listed = replace(listed, engine_version=version, engine_paused="")
                writing = asyncio.ensure_future(self._pool.ledger.carried_out(place.url, listed.n_done, "", version))
                # a store that is away learns it later; calls that wait for this engine need not wait for that
                await asyncio.wait([writing], timeout=_STORE_S)

    def _order(self, place: Place) -> None:
        """See to it that an engine is told its orders; a newer one takes the place of one that is being given."""
        key, number = ("order", place.url), place.listed.n_orders
        running = self._jobs.get(key)
        if running is not None and self._orders.get(place.url) != number:
            running.cancel()
            del self._jobs[key]
            running = None
        if running is None:
            self._orders[place.url] = number
            self._begin(*key, self._give_orders(place, number))

    async def _give_orders(self, place: Place, number: int) -> None:
        pause_s = _ORDER_S[0]
        while place.listed.n_orders == number and place.listed.n_done < number:
            if await self._pool.ledger.leads():
                try:
                    await carry_out(place, place.listed, self._pool)
                    return
                except EngineError as error:
                    log.warning("engine %s does not follow an order: %s", place.url, error)
                    self._pool.ledger.failing(place.url, f"does not follow an order: {error}")
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _ORDER_S[1])

    async def _lead(self) -> None:
        await self._pool.ledger.leads()
