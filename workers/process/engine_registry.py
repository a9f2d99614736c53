"""The engines of the farm as seen by one worker process: read from the store and written back, off the event loop.

A thread reads the list every two seconds, and immediately after a change notification, so neither a call nor the event
loop waits for the database.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from typing import Any

from farm.errors import NotAllowed
from farm.notifications import ENGINES, Signals
from farm.records.engine import EngineInfo
from farm.records.engine_state import EngineUse, Paused, StoredEngine
from farm.store import leader, llm_engines
from farm.store.access.sealed_secrets import SecretKey
from farm.store.database import Store
from workers.policy.routing.backend import EngineReporter
from workers.stages.redaction import in_use

log = logging.getLogger(__name__)

_PERIOD_S = 2.0
_CLOSE_S = 0.25
"""Maximum time until a close is noticed."""
_MIN_S = 0.05
_ROLE = "engines"
_LEAD_S = 10.0
_LOG_AGAIN_S = 10.0
"""Interval in which the same failure of the same engine is recorded only once."""
_REMIND_S = 60.0
_FORGET_S = 3600.0
_FORGET_ME_S = 3.0


class EngineRegistry(EngineReporter):
    """Reads until closed. `on_change` is called from its thread."""

    def __init__(
        self,
        store: Store,
        signals: Signals,
        owner: str,
        secret_key: SecretKey,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        self.on_change = on_change
        self._store = store
        self._signals = signals
        self._owner = owner
        self._secret_key = secret_key
        self._listed: tuple[StoredEngine, ...] = ()
        self._reported_failures: dict[str, tuple[str, float]] = {}
        self._reported: Mapping[str, EngineUse] = {}
        self._reminded = 0.0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-registry", daemon=True)

    def start(self) -> None:
        """Read the list once, then continue in the background. Raises StoreUnavailable."""
        self._read()
        self._thread.start()

    def __call__(self) -> Sequence[StoredEngine]:
        """Return the engines as last read, without waiting."""
        return self._listed

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(timeout=3.0)
        try:
            forget = self._store.submit(lambda connection: llm_engines.forget_user(connection, self._owner))
            forget.result(timeout=_FORGET_ME_S)
        except Exception as error:
            log.warning("In-flight counts of this worker not cleared; they expire in a few seconds: %s", error)

    def _run(self) -> None:
        due = time.monotonic() + _PERIOD_S
        with closing(self._signals.listen(ENGINES)) as listener:
            while not self._closed.is_set():
                if not listener.wait(_CLOSE_S) and time.monotonic() < due:
                    continue
                due = time.monotonic() + _PERIOD_S
                try:
                    self._read()
                except Exception as error:
                    log.warning("Engines could not be read; keeping the last list: %s", error)
                # limits the rate, however many notifications arrive
                self._closed.wait(_MIN_S)

    def _read(self) -> None:
        engines = self._store.read(llm_engines.listing)
        self._remind(engines)
        listed = tuple(self._unsealed(engine) for engine in engines)
        if listed != self._listed:
            self._listed = listed
            if self.on_change is not None:
                self.on_change()

    def _unsealed(self, engine: StoredEngine) -> StoredEngine:
        """Return an engine with its key. If the key is missing, the engine itself will answer that it needs one."""
        try:
            key = self._secret_key.unseal(engine.key)
            # servers repeat what they were sent
            in_use.add(key)
            return replace(engine, key=key)
        except NotAllowed as error:
            self.report_failure(engine.url, str(error))
            return replace(engine, key="none")

    def _remind(self, engines: Sequence[StoredEngine]) -> None:
        """Log the paused engines at intervals, because a killed client leaves them paused."""
        longest = max(engines, key=lambda engine: engine.paused_s, default=None)
        if longest is None or longest.paused_s < _REMIND_S or time.monotonic() - self._reminded < _REMIND_S:
            return
        self._reminded = time.monotonic()
        log.warning(
            "Engine %s has been paused for %.0f s by %s; if that process has ended, run `farm engines resume`",
            *(longest.url, longest.paused_s, longest.paused_by),
        )

    def report_info(self, url: str, info: EngineInfo) -> None:
        self._write(lambda connection: llm_engines.set_info(connection, url, info))

    def report_failure(self, url: str, why: str) -> None:
        last, reported_at = self._reported_failures.get(url, ("", 0.0))
        if why and why == last and time.monotonic() - reported_at < _LOG_AGAIN_S:
            return
        self._reported_failures[url] = (why, time.monotonic())
        self._write(lambda connection: llm_engines.set_failure(connection, url, why))

    def report(self, in_flight: Mapping[str, EngineUse]) -> None:
        news = in_flight != self._reported
        self._reported = in_flight
        paused = any(each.paused for each in self._listed)
        self._write(lambda connection: llm_engines.report(connection, self._owner, in_flight), hint=news and paused)

    async def is_leader(self) -> bool:
        def lead(connection: Any) -> bool:
            llm_engines.forget_users(connection, _FORGET_S)
            return leader.acquire_leadership(connection, _ROLE, self._owner, _LEAD_S)

        return await asyncio.wrap_future(self._store.submit(lead))

    async def has_settled(self, url: str, order: int) -> bool:
        def look(connection: Any) -> bool:
            by_owner = llm_engines.uses(connection)
            held = (uses.get(url) for uses in by_owner.values())
            return all(use is not None and use.n_orders >= order and not use.n_calls for use in held)

        return await asyncio.to_thread(self._store.read, look)

    async def report_done(self, url: str, order: int, paused: Paused, version: str) -> None:
        await asyncio.wrap_future(
            self._store.submit(lambda connection: llm_engines.carried_out(connection, url, order, paused, version))
        )
        await asyncio.to_thread(self._signals.acknowledged)

    def _write(self, work: Callable[[Any], None], *, hint: bool = False) -> None:
        """Write in the background. A failure affects only what is displayed, and is logged."""
        self._store.submit(work).add_done_callback(lambda done: self._written(done, hint))

    def _written(self, done: Future[None], hint: bool) -> None:
        if (error := done.exception()) is not None:
            log.warning("Engine states could not be written: %s", error)
        elif hint:
            self._signals.acknowledged()
