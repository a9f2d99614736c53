"""The dispatcher: admits rollouts to nodes with room, rings again what nobody heard, takes work back from the dead.

One leads at a time, by a lease; every node supervisor runs one. Two at once would do no harm, since all they write is
guarded. Admission here keeps the broker's queues short, so that losing the broker costs nothing, and keeps rollouts
that wait from holding a sandbox.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from farm.queue import celery_app, ring
from farm.rollout import Failure, Outcome, Stage
from farm.settings import Settings
from farm.signals import ENDED, WAKE, Signals
from farm.store import nodes, placement, rollouts
from farm.store.engine import Store
from farm.store.placement import Bell, Waiting

log = logging.getLogger(__name__)

ROLE = "dispatcher"
_LEASE_S = 10.0
_LIMIT = 1000
_PACE_S = 0.02
"""The least time between rounds of a busy farm: what ends within it is placed together. A lone rollout never waits."""


class Dispatcher:
    """`run` until `stop`. `owner` names the process in the leader's lease."""

    def __init__(self, store: Store, signals: Signals, settings: Settings, owner: str) -> None:
        self._store = store
        self._signals = signals
        self._settings = settings
        self._owner = owner
        self._app = celery_app(settings.broker_url, "farm-dispatcher")
        self._stopped = threading.Event()
        self._leads_until = 0.0
        self._next_care = 0.0

    def run(self) -> None:
        """Dispatch until stopped; a database that is away is waited for."""
        listener = self._signals.listen(WAKE, ENDED)
        try:
            while not self._stopped.is_set():
                busy = False
                try:
                    busy = self._turn()
                except Exception:
                    log.exception("the dispatcher could not do its round; it will try again")
                    self._stopped.wait(1.0)
                if busy:
                    self._stopped.wait(_PACE_S)
                listener.wait(self._settings.tick_s)
        finally:
            listener.close()
            if self._leads_until > time.monotonic():
                self._store.write(lambda connection: nodes.abdicate(connection, ROLE, self._owner))

    def stop(self) -> None:
        self._stopped.set()
        self._signals.wake()

    def _turn(self) -> bool:
        """One round; whether more than a lone rollout is under way."""
        if not self._leads():
            return False
        now = time.monotonic()
        if now >= self._next_care:
            self._next_care = now + self._settings.tick_s
            self._take_back()
            self._ring_again()
        return self._admit()

    def _leads(self) -> bool:
        now = time.monotonic()
        if now > self._leads_until - _LEASE_S / 2:
            leads = self._store.write(lambda connection: nodes.lead(connection, ROLE, self._owner, _LEASE_S))
            self._leads_until = now + _LEASE_S if leads else 0.0
        return self._leads_until > now

    def _take_back(self) -> None:
        """Queue again what dead workers and dead nodes held."""
        for held, max_attempts in self._store.read(lambda connection: rollouts.expired(connection, _LIMIT)):
            again = held.n_failures + 1 < max_attempts
            failure = Failure(
                Outcome.LOST,
                f"{held.rollout_id}: the worker {held.owner} was lost in stage {held.stage}, attempt {held.attempt}"
                + ("" if again else f"; no attempt of {max_attempts} is left"),
            )
            retry_in_s = 0.0 if again else None
            log.warning("%s", failure.message)
            self._store.write(partial(rollouts.fail, held=held, failure=failure, retry_in_s=retry_in_s))
            if retry_in_s is None:
                self._signals.ended(held.batch_id)
        known = self._store.read(nodes.listing)
        alive = {node.node for node in known if node.heartbeat_age_s < self._settings.node_timeout_s}
        placed = self._store.read(placement.occupied)
        dead = placed.keys() - alive
        if dead:
            moved = self._store.write(lambda connection: placement.abandon(connection, dead))
            if moved:
                log.warning("%d queued rollouts were taken off dead nodes: %s", moved, ", ".join(sorted(dead)))

    def _ring_again(self) -> None:
        again_s = self._settings.ring_again_s
        bells = self._store.read(lambda connection: placement.any_unheard(connection)) and self._store.write(
            lambda connection: placement.unheard(connection, again_s, _LIMIT)
        )
        if bells:
            log.info("ringing again for %d stages that nobody took", len(bells))
            ring(self._app, bells)

    def _admit(self) -> bool:
        """Give waiting rollouts to nodes with room; whether there were several."""
        waits = self._store.read(placement.waiting)
        if not waits:
            return False
        room = self._room()
        bells = [
            Bell(rollout_id, attempt, stage, node)
            for (rollout_id, attempt, stage), node in zip(
                self._chosen(waits, sum(room.values())), _seats(room), strict=False
            )
        ]
        if bells:
            again_s = self._settings.ring_again_s
            self._store.write(lambda connection: placement.place(connection, bells, again_s))
            ring(self._app, bells)
        return sum(wait.n_waiting for wait in waits) > 1

    def _room(self) -> dict[str, int]:
        """Node → how many more rollouts it takes."""
        placed = self._store.read(placement.occupied)
        return {
            node.node: max(0, node.room - placed.get(node.node, 0))
            for node in self._store.read(nodes.listing)
            if node.state == nodes.UP and node.heartbeat_age_s < self._settings.node_timeout_s
        }

    def _chosen(self, waits: Sequence[Waiting], room: int) -> Iterator[tuple[str, int, Stage]]:
        for batch_id, share in shares(waits, room).items():
            yield from self._store.read(partial(placement.next_of, batch_id=batch_id, limit=share))


def shares(waits: Sequence[Waiting], room: int) -> dict[str, int]:
    """How many rollouts of each batch to admit: higher priority first, then evenly over what each has under way."""
    given: dict[str, int] = {}
    for priority in sorted({wait.priority for wait in waits}, reverse=True):
        level = [wait for wait in waits if wait.priority == priority]
        for batch_id, share in _level(level, room).items():
            given[batch_id] = share
            room -= share
    return given


def _level(waits: Sequence[Waiting], room: int) -> dict[str, int]:
    """Fill up batches of one priority so that those with the fewest under way catch up first."""
    given = dict.fromkeys((wait.batch_id for wait in waits), 0)
    open_waits = list(waits)
    while room > 0 and open_waits:
        open_waits.sort(key=lambda wait: wait.n_placed + given[wait.batch_id])
        lowest = open_waits[0]
        level = lowest.n_placed + given[lowest.batch_id]
        following = open_waits[1].n_placed + given[open_waits[1].batch_id] if len(open_waits) > 1 else level + room
        step = min(room, max(1, following - level), lowest.n_waiting - given[lowest.batch_id])
        given[lowest.batch_id] += step
        room -= step
        open_waits = [wait for wait in open_waits if given[wait.batch_id] < wait.n_waiting]
    return {batch_id: share for batch_id, share in given.items() if share}


def _seats(room: Mapping[str, int]) -> Iterator[str]:
    """Node names, the emptiest first, one for each place there is."""
    left = dict(room)
    while left:
        node = max(left, key=lambda name: left[name])
        if left[node] <= 0:
            return
        left[node] -= 1
        yield node
