"""Tells an engine what the farm ordered: to pause, which weights it has, to go on.

What the engine is about to be told is written down first. So if this process dies in between, the next one knows that
the engine may be paused, and pauses it again, which does no harm. An engine that cannot be reached has nothing in
flight, so it counts as paused; but it did not get the new weights, so it does not count as having them, and is given no
calls until it is told that it has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from farm.errors import EngineError
from workers.policy.generation import Engine
from workers.policy.listed import Ledger, Listed, Paused
from workers.policy.place import Client, Place

_LOST: Paused = ""
"""An engine that does not answer forgets that it was paused."""


class Told(Protocol):
    """What giving orders needs of the pool."""

    ledger: Ledger

    def client(self, place: Place) -> Client: ...
    def eject(self, place: Place, why: str) -> None: ...


async def carry_out(place: Place, listed: Listed, pool: Told) -> None:
    """Tell an engine all orders that `listed` holds. Raises EngineError if it is well but does not follow."""
    if place.info is None or (place.standing.out and not place.info.control):
        paused, version = _LOST, listed.engine_version
    elif not place.info.control:
        # what there is to be done is done by the pools, which hold their calls back
        paused, version = listed.paused, _named(listed)
    else:
        with pool.client(place).used() as engine:
            paused, version = await _tell(engine, place, listed, pool)
    await pool.ledger.carried_out(place.url, listed.n_orders, paused, version)
    if place.listed.n_orders == listed.n_orders:
        # the farm will say so, too, but a moment later
        place.listed = replace(place.listed, n_done=listed.n_orders, engine_paused=paused, engine_version=version)


async def _tell(engine: Engine, place: Place, listed: Listed, pool: Told) -> tuple[Paused, str]:
    """How the engine is paused then, and which weights it is known to have."""
    try:
        if place.told_pause and await engine.paused() is False:
            # it was started anew, and what was pushed meanwhile may have gone to the one before it
            place.told_pause = ""
            return _LOST, await engine.version()
        if listed.paused and not listed.paused == listed.engine_paused == place.told_pause:
            await pool.ledger.carried_out(place.url, listed.n_done, listed.paused, listed.engine_version)
            await engine.pause(listed.paused)
            place.told_pause = listed.paused
        if listed.to_name:
            await engine.set_version(listed.version)
        if listed.engine_paused and not listed.paused:
            await engine.resume()
    except EngineError:
        if await engine.healthy():
            raise
        if not place.standing.out:
            pool.eject(place, "does not answer")
        return _LOST, listed.engine_version
    return listed.paused, _named(listed)


def _named(listed: Listed) -> str:
    """The version that it has once its orders are carried out."""
    return listed.version if listed.to_name else listed.engine_version
