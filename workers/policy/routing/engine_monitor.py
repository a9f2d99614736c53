"""The engine monitor of a worker process: probes new engines, checks the health of all, sends orders.

Every process has its own, as an engine may be unreachable from one node only. Orders (pause, resume, name the weights)
are sent by one process of the farm; the others only hold their calls back.

A pause is recorded before it is sent. If this process crashes in between, the next one knows that the engine may be
paused, and pauses it again, which is harmless. An unreachable engine has nothing in flight, so it counts as paused; but
it did not get the new weights, so it gets no calls until they are named.

A draining server keeps calls that arrive afterwards until it is resumed. So the pause is sent only once every worker
holds its calls back and none has one in flight there: otherwise a late call would wait for the resume, and the resume
for the call. An abort is sent at once, and repeated while calls are in flight: late ones end with the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from farm.errors import EngineError
from farm.records.engine import EngineInfo
from farm.records.engine_state import Paused, StoredEngine
from workers.policy.generation import Engine, EngineAddress, EngineBusy
from workers.policy.routing.backend import Backend
from workers.policy.routing.model_texts import tool_format_of

if TYPE_CHECKING:
    from workers.policy.routing.pool import EnginePool

log = logging.getLogger(__name__)

Detect: TypeAlias = Callable[[EngineAddress, float], Awaitable[EngineInfo]]

_POLL_S = 0.05
_ABORT_AGAIN_S = 0.2
_N_ABORTS = 5
"""Maximum number of aborts; workers cut the calls that the engine still keeps."""
_LOST: Paused = ""
"""The pause of an engine that does not answer: assumed lost."""
_PERIOD_S = 0.5
_BEAT_S = 4.0
_STORE_S = 2.0
_AGAIN_S = 0.5
"""Seconds until the next check of an engine that failed one."""
_DETECT_S = (1.0, 30.0)
_DOUBLINGS = 10
"""Maximum doublings of a delay: an engine may be unreachable for days."""
_ANSWER_S = (10.0, 80.0)
"""The first and the longest timeout of a probe; it doubles with each failure.

An engine may just be slow: a large model on a CPU, or one with a long queue.
"""
_LATE_S = 2.0
"""Seconds in which an engine must answer the calls that it aborts, once the abort was repeated several times."""
_ORDER_S = (1.0, 10.0)
_VERSION_S = 5.0
_WEIGHTS_AGAIN_S = 10.0
"""Seconds until an engine that failed to load its weights is ordered again."""
_SILENT_S = 15.0
"""Seconds without an answer after which an engine must sample a test token: it may be healthy, yet hang."""
_UNRESPONSIVE_S = 300.0
"""If the test token fails too and it was silent for so many seconds, its calls move to other engines, if any.

A fully loaded engine can also be silent for long, and its work would be lost. Until it answers, its calls count as
blocked.
"""


async def carry_out(backend: Backend, listed: StoredEngine, pool: EnginePool) -> None:
    """Send an engine all orders in `listed`. Raises EngineError if it is healthy but does not obey."""
    if backend.info is None or (backend.health.is_ejected and not backend.info.control):
        paused, version = _LOST, listed.engine_version
    elif not backend.info.control:
        # The pools implement the pause: they hold their calls back.
        paused, version = listed.paused, _named(listed)
    else:
        with pool.client(backend).borrowed() as engine:
            paused, version = await _tell(engine, backend, listed, pool)
    await pool.reporter.report_done(backend.url, listed.n_orders, paused, version)
    if backend.record.n_orders == listed.n_orders:
        # The farm's next record will say so, too, but a moment later.
        backend.record = replace(backend.record, n_done=listed.n_orders, engine_paused=paused, engine_version=version)


async def _tell(engine: Engine, backend: Backend, listed: StoredEngine, pool: EnginePool) -> tuple[Paused, str]:
    """Send the orders; return the engine's pause afterwards, and the version of the weights it is known to have."""
    try:
        if (backend.known_pause or listed.engine_paused) and await engine.paused() is False:
            version = await engine.version()
            if backend.known_pause or (listed.engine_version and version != listed.engine_version):
                # It was restarted: weights pushed meanwhile may have gone to the previous process.
                backend.known_pause = ""
                return _LOST, version
        if listed.paused and not listed.paused == listed.engine_paused == backend.known_pause:
            if listed.paused == "drain":
                await _settled(backend, listed, pool)
            await pool.reporter.report_done(backend.url, listed.n_done, listed.paused, listed.engine_version)
            await engine.pause(listed.paused)
            backend.known_pause = listed.paused
            if listed.paused == "abort":
                await _abort_late(engine, backend, listed, pool)
        if listed.to_name:
            await engine.set_version(listed.version)
        if listed.engine_paused and not listed.paused:
            await engine.resume()
    except EngineError:
        if await engine.healthy():
            raise
        if not backend.health.is_ejected:
            pool.eject(backend, "does not answer")
        return _LOST, listed.engine_version
    return listed.paused, _named(listed)


async def load_weights(backend: Backend, listed: StoredEngine, pool: EnginePool) -> None:
    """Make an engine load the farm's weights from their path, and name them. Raises EngineError."""
    with pool.client(backend).borrowed() as engine:
        await engine.load_weights(listed.weights_path)
        await engine.set_version(listed.version)
    # Ignored if newer orders have been given since.
    await pool.reporter.report_done(backend.url, listed.n_done, listed.engine_paused, listed.version)
    if backend.record == listed:
        backend.record = replace(listed, engine_version=listed.version)


async def _settled(backend: Backend, listed: StoredEngine, pool: EnginePool) -> None:
    while not await pool.reporter.has_settled(backend.url, listed.n_orders):  # noqa: ASYNC110 - other processes report it
        await asyncio.sleep(_POLL_S)


async def _abort_late(engine: Engine, backend: Backend, listed: StoredEngine, pool: EnginePool) -> None:
    """Repeat an abort until no worker has a call in flight there, a few times at most."""
    for _ in range(_N_ABORTS):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_AGAIN_S):
                await _settled(backend, listed, pool)
                return
        await engine.pause("abort")


def _named(listed: StoredEngine) -> str:
    return listed.version if listed.to_name else listed.engine_version


class Monitor:
    """One task, plus one for each running check or order."""

    def __init__(self, pool: EnginePool, detect: Detect, check_s: float) -> None:
        self._pool = pool
        self._detect = detect
        self._check_s = check_s
        self._task: asyncio.Task[None] | None = None
        self._jobs: dict[tuple[str, str], asyncio.Task[Any]] = {}
        self._orders: dict[str, int] = {}
        self._due: dict[str, float] = {}
        self._weights_due: dict[str, float] = {}
        self._n_detections: dict[str, int] = {}
        self._tool_formats: dict[str, str] = {}
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
        """Wake the monitor after a change."""
        self._news.set()

    def doubt(self, backend: Backend) -> None:
        """Check an engine at once: a call failed there, or its record changed."""
        self._due[backend.url] = 0.0
        self.look()

    def forget(self, url: str) -> None:
        """Cancel the jobs of an engine that is no longer listed, and drop its state."""
        for key in [key for key in self._jobs if key[1] == url]:
            self._jobs.pop(key).cancel()
        self._due.pop(url, None)
        self._weights_due.pop(url, None)
        self._n_detections.pop(url, None)
        self._tool_formats.pop(url, None)

    async def _run(self) -> None:
        while True:
            try:
                self._tend_all()
            except Exception:
                log.exception("Engine monitoring failed; retrying")
            self._news.clear()
            # Not wait_for: in Python 3.11 it can lose a simultaneous cancellation.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PERIOD_S):
                    await self._news.wait()

    def _tend_all(self) -> None:
        now = asyncio.get_running_loop().time()
        for backend in self._pool.backends:
            self._tend(backend, now)
        if now >= self._beat_due:
            self._beat_due = now + _BEAT_S
            self._pool.report()
            if any(kind in ("order", "weights") for kind, _ in self._jobs):
                self._begin("lead", "", self._pool.reporter.is_leader())

    def _tend(self, backend: Backend, now: float) -> None:
        if backend.record.n_done < backend.record.n_orders:
            self._order(backend)
        if self._may_load(backend, now):
            self._begin("weights", backend.url, self._give_weights(backend))
        self._cut_late(backend, now)
        if backend.record.paused:
            backend.last_answer_at = now
        elif backend.silent_s(now) > _SILENT_S:
            # It may be healthy and hang all the same: let it sample.
            backend.is_undetected = True
        if now < max(
            self._due.get(backend.url, 0.0), backend.health.ejected_until if backend.health.is_ejected else 0.0
        ):
            return
        if backend.record.paused and backend.info is not None:
            # It may answer nothing at all.
            return
        look = self._find_out if backend.is_undetected else self.check
        self._begin("look", backend.url, look(backend))

    def _may_load(self, backend: Backend, now: float) -> bool:
        listed, info = backend.record, backend.info
        lacks = listed.lacks_weights and bool(listed.weights_path) and not listed.paused
        able = info is not None and info.control and not backend.health.is_ejected
        return lacks and able and now >= self._weights_due.get(backend.url, 0.0)

    @staticmethod
    def _cut_late(backend: Backend, now: float) -> None:
        """Abort calls that arrived after the engine's own abort: it would keep them until it is resumed."""
        if not backend.has_aborted or not backend.in_flight:
            backend.cut_at = 0.0
        elif not backend.cut_at:
            backend.cut_at = now
        elif now - backend.cut_at > _LATE_S:
            backend.abort_calls("is paused for new weights", died=False)

    def _begin(self, kind: str, url: str, job: Coroutine[Any, Any, Any]) -> None:
        key = (kind, url)
        if key in self._jobs:
            job.close()
            return
        task = asyncio.get_running_loop().create_task(job)
        self._jobs[key] = task
        task.add_done_callback(lambda done: self._ended(key, done))

    def _ended(self, key: tuple[str, str], task: asyncio.Task[Any]) -> None:
        if self._jobs.get(key) is task:
            del self._jobs[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("Engine %s could not be monitored: %r", key[1], error, exc_info=error)
            self._due[key[1]] = asyncio.get_running_loop().time() + self._check_s

    async def _find_out(self, backend: Backend) -> None:
        url, loop = backend.url, asyncio.get_running_loop()
        try:
            info = await self._detect(backend.address, self._timeout_s(backend))
        except EngineError as error:
            self._not_found_out(backend, error, loop.time())
            return
        backend.last_answer_at = loop.time()
        self._n_detections.pop(url, None)
        self._due[url] = loop.time() + self._check_s
        # Another node may have the tokenizer that this one lacks.
        known = backend.record.info.tool_format if backend.record.info is not None else ""
        info = info.model_copy(update={"tool_format": self._tool_formats.get(url) or known})
        backend.learn(info)
        self._pool.reporter.report_info(url, info)
        if url not in self._tool_formats:
            self._begin("format", url, self._tell_tool_format(backend, info))
        await self._see_weights(backend)
        if backend.health.is_ejected:
            backend.health = backend.health.readmitted(loop.time())
        self._pool.wake()

    async def _tell_tool_format(self, backend: Backend, info: EngineInfo) -> None:
        """Report the model's tool format, separately from the capabilities: a tokenizer may take minutes."""
        tool_format = await tool_format_of(backend.address, info)
        if tool_format:
            self._tool_formats[backend.url] = tool_format
            info = info.model_copy(update={"tool_format": tool_format})
            backend.learn(info)
            self._pool.reporter.report_info(backend.url, info)

    def _timeout_s(self, backend: Backend) -> float:
        first_s, longest_s = _ANSWER_S
        n_failed = self._n_detections.get(backend.url, 0) if backend.info is None else 0
        return min(first_s * 2.0 ** min(n_failed, _DOUBLINGS), longest_s)

    def _not_found_out(self, backend: Backend, error: EngineError, now: float) -> None:
        url = backend.url
        n = self._n_detections[url] = self._n_detections.get(url, 0) + 1
        self._due[url] = now + min(_DETECT_S[0] * 2.0 ** min(n - 1, _DOUBLINGS), _DETECT_S[1])
        if isinstance(error, EngineBusy) and backend.info is not None:
            # It was detected before, and may be overloaded.
            backend.mark_busy(now, error.retry_after_s)
            return
        backend.health = backend.health.ejected(now, f"cannot be probed: {error}")
        self._pool.reporter.report_failure(url, backend.health.reason)
        others = (other for other in self._pool.backends if other is not backend)
        if backend.silent_s(now) > _UNRESPONSIVE_S and any(
            not (each.health.is_ejected or each.record.paused) for each in others
        ):
            backend.abort_calls(f"has not answered for {backend.silent_s(now):.0f} s", died=True)
        self._pool.wake()

    async def check(self, backend: Backend) -> None:
        """Check the health of an engine, and eject or readmit it accordingly."""
        loop = asyncio.get_running_loop()
        # A failure from here on makes another check due, which this one must not postpone.
        self._due[backend.url] = loop.time() + self._check_s * random.uniform(0.75, 1.25)  # noqa: S311 - no secret
        with self._pool.client(backend).borrowed() as engine:
            is_healthy = await engine.healthy()
            if is_healthy:
                await self._see_weights(backend)
        if backend.health.is_ejected:
            if is_healthy:
                backend.health = backend.health.readmitted(loop.time())
                self._pool.reporter.report_failure(backend.url, "")
                self._pool.wake()
            else:
                backend.health = backend.health.ejected_longer(loop.time())
            return
        backend.health = backend.health.after_check(is_healthy)
        if backend.health.fails_checks:
            self._pool.eject(backend, "does not answer")
        elif backend.health.is_suspect:
            self._due[backend.url] = loop.time() + _AGAIN_S
        elif backend.record.failure:
            self._pool.reporter.report_failure(backend.url, "")

    async def _see_weights(self, backend: Backend) -> None:
        """Update the version of an engine: it may have been restarted, or be new and already have the weights."""
        listed = backend.record
        if not listed.version or listed.paused or listed.to_name or backend.info is None or not backend.info.control:
            return
        with self._pool.client(backend).borrowed() as engine, contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_VERSION_S):
                version = await engine.version()
            if version and version != listed.engine_version and backend.record == listed:
                backend.record = replace(listed, engine_version=version, engine_paused="")
                writing = asyncio.ensure_future(
                    self._pool.reporter.report_done(backend.url, listed.n_done, "", version)
                )
                # An unreachable store gets it later; calls that wait for this engine do not wait for that.
                await asyncio.wait([writing], timeout=_STORE_S)
                self._pool.wake()

    async def _give_weights(self, backend: Backend) -> None:
        """Make an engine that lacks the farm's weights load them from the trainer's path."""
        self._weights_due[backend.url] = asyncio.get_running_loop().time() + _WEIGHTS_AGAIN_S
        if not await self._pool.reporter.is_leader():
            return
        listed = backend.record
        log.info("Engine %s loads weights version %s from %s", backend.url, listed.version, listed.weights_path)
        try:
            await load_weights(backend, listed, self._pool)
        except EngineError as error:
            log.warning("Engine %s could not load the weights: %s", backend.url, error)
            self._pool.reporter.report_failure(
                backend.url, f"could not load the weights from {listed.weights_path}: {error}"
            )
            return
        self._pool.reporter.report_failure(backend.url, "")
        self._pool.wake()

    def _order(self, backend: Backend) -> None:
        """Start sending an engine its orders; a newer order replaces a running one."""
        key, number = ("order", backend.url), backend.record.n_orders
        running = self._jobs.get(key)
        if running is not None and self._orders.get(backend.url) != number:
            running.cancel()
            del self._jobs[key]
            running = None
        if running is None:
            self._orders[backend.url] = number
            # An order implies that the engine exists: it may have returned a moment ago.
            backend.health = replace(backend.health, ejected_until=0.0)
            self._due[backend.url] = 0.0
            self._begin(*key, self._give_orders(backend, number))

    async def _give_orders(self, backend: Backend, number: int) -> None:
        pause_s = _ORDER_S[0]
        while backend.record.n_orders == number and backend.record.n_done < number:
            if await self._pool.reporter.is_leader():
                try:
                    await carry_out(backend, backend.record, self._pool)
                    return
                except EngineError as error:
                    log.warning("Engine %s does not follow an order: %s", backend.url, error)
                    self._pool.reporter.report_failure(backend.url, f"does not follow an order: {error}")
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _ORDER_S[1])
