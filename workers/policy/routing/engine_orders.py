"""Sends an engine the farm's orders: pause, name the weights, resume.

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
from dataclasses import replace
from typing import Protocol

from farm.errors import EngineError
from workers.policy.generation import Engine
from workers.policy.routing.backend import Backend, SharedEngine
from workers.policy.routing.engine_view import EngineRecord, EngineReporter, Paused

_POLL_S = 0.05
_ABORT_AGAIN_S = 0.2
_N_ABORTS = 5
"""Maximum number of aborts; workers cut the calls that the engine still keeps."""
_LOST: Paused = ""
"""The pause of an engine that does not answer: assumed lost."""


class ControlledPool(Protocol):
    """The part of the pool that sending orders uses."""

    reporter: EngineReporter

    def client(self, backend: Backend) -> SharedEngine: ...
    def eject(self, backend: Backend, why: str) -> None: ...


async def carry_out(backend: Backend, listed: EngineRecord, pool: ControlledPool) -> None:
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


async def _tell(engine: Engine, backend: Backend, listed: EngineRecord, pool: ControlledPool) -> tuple[Paused, str]:
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


async def load_weights(backend: Backend, listed: EngineRecord, pool: ControlledPool) -> None:
    """Make an engine load the farm's weights from their path, and name them. Raises EngineError."""
    with pool.client(backend).borrowed() as engine:
        await engine.load_weights(listed.weights_path)
        await engine.set_version(listed.version)
    # Ignored if newer orders have been given since.
    await pool.reporter.report_done(backend.url, listed.n_done, listed.engine_paused, listed.version)
    if backend.record == listed:
        backend.record = replace(listed, engine_version=listed.version)


async def _settled(backend: Backend, listed: EngineRecord, pool: ControlledPool) -> None:
    """Wait until no worker has a call in flight there; a newer order cancels that."""
    while not await pool.reporter.has_settled(backend.url, listed.n_orders):  # noqa: ASYNC110 - other processes report it
        await asyncio.sleep(_POLL_S)


async def _abort_late(engine: Engine, backend: Backend, listed: EngineRecord, pool: ControlledPool) -> None:
    """Repeat an abort until no worker has a call in flight there, a few times at most."""
    for _ in range(_N_ABORTS):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_AGAIN_S):
                await _settled(backend, listed, pool)
                return
        await engine.pause("abort")


def _named(listed: EngineRecord) -> str:
    """Return the version that it has once its orders are carried out."""
    return listed.version if listed.to_name else listed.engine_version
