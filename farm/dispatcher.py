"""The dispatcher: admits rollouts to nodes with room, rings again what nobody heard, takes work back from the dead.

One leads at a time, by a lease; every node supervisor runs one. Two at once would do no harm, since all they write is
guarded. Admission here keeps the broker's queues short, so that losing the broker costs nothing, and keeps rollouts
that wait from holding a sandbox. While the store does not answer, nobody can say that it lives: so after that nobody is
taken for dead until there was time to.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from farm.auditor import Auditor
from farm.errors import StoreUnavailable
from farm.queue import celery_app, ring
from farm.rollout import Failure, Outcome, Stage
from farm.settings import Settings
from farm.signals import ENDED, WAKE, Signals
from farm.store import failures, leases, nodes, placement
from farm.store.engine import Store, Work
from farm.store.failures import Ending, Patience
from farm.store.nodes import Node
from farm.store.placement import Bell, Waiting
from farm.store.rollouts import Claim
from farm.verdict import verdict

T = TypeVar("T")
log = logging.getLogger(__name__)

ROLE = "dispatcher"
_LEASE_S = 10.0
_LIMIT = 1000
_SHAKEN_S = 10.0
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
        self._unanswered_since = 0.0
        self._leases_count_at = math.inf
        self._heartbeats_count_at = math.inf
        self._sick: dict[str, tuple[int, str]] = {}
        self._served: dict[str, int] = {}
        self._lost_at: dict[str, float] = {}
        self._auditor = Auditor(store, settings.audit_s, lambda: self._leads_until > time.monotonic())

    def run(self) -> None:
        """Dispatch until stopped; a database that is away is waited for."""
        listener = self._signals.listen(WAKE, ENDED)
        # it has not seen whether the store answered until now
        self._leases_count_at = time.monotonic() + self._settings.lease_s
        self._heartbeats_count_at = time.monotonic() + self._settings.node_timeout_s
        self._auditor.start()
        try:
            while not self._stopped.is_set():
                busy = False
                try:
                    busy = self._leads() and self._round()
                except Exception:
                    log.exception("the dispatcher could not do its round; it will try again")
                    self._stopped.wait(1.0)
                if busy:
                    self._stopped.wait(_PACE_S)
                listener.wait(self._settings.tick_s)
        finally:
            listener.close()
            self._auditor.close()
            if self._leads_until > time.monotonic():
                with suppress(StoreUnavailable):
                    self._store.write(lambda connection: nodes.abdicate(connection, ROLE, self._owner))

    def stop(self) -> None:
        self._stopped.set()
        self._signals.wake()

    def _round(self) -> bool:
        """Whether more than a lone rollout is under way."""
        now = time.monotonic()
        if now >= self._next_care:
            self._next_care = now + self._settings.tick_s
            self._take_back()
            self._ring_again()
        return self._admit()

    def _read(self, work: Work[T]) -> T:
        return self._answered(self._store.read, work)

    def _write(self, work: Work[T]) -> T:
        return self._answered(self._store.write, work)

    def _answered(self, ask: Callable[[Work[T]], T], work: Work[T]) -> T:
        """What the store answers: if that took long, leases and heartbeats could not be renewed meanwhile.

        Only the store is timed, whatever else makes a round slow: otherwise nobody would ever be taken for dead. What
        it did not answer at all counts as the beginning of the next question.
        """
        self._unanswered_since = self._unanswered_since or time.monotonic()
        answer = ask(work)
        now = time.monotonic()
        waited_s, self._unanswered_since = now - self._unanswered_since, 0.0
        if waited_s > self._settings.lease_s / 2:
            self._leases_count_at = now + self._settings.lease_s
        if waited_s > self._settings.node_timeout_s / 2:
            self._heartbeats_count_at = now + self._settings.node_timeout_s
            log.warning("the store did not answer for %.0f s; all get time to say that they live", waited_s)
        return answer

    def _leads(self) -> bool:
        now = time.monotonic()
        if now > self._leads_until - _LEASE_S / 2:
            leads = self._write(lambda connection: nodes.lead(connection, ROLE, self._owner, _LEASE_S))
            self._leads_until = now + _LEASE_S if leads else 0.0
        return self._leads_until > now

    def _take_back(self) -> None:
        """Queue again what dead workers and dead nodes held."""
        self._take_back_expired()
        known = self._read(nodes.listing)
        placed = self._read(placement.occupied)
        timeout_s = self._settings.node_timeout_s if time.monotonic() >= self._heartbeats_count_at else math.inf
        dead = placed.keys() - {node.node for node in known if node.heartbeat_age_s < timeout_s}
        if dead:
            moved = self._write(lambda connection: placement.abandon(connection, dead))
            if moved:
                log.warning("%d queued rollouts were taken off dead nodes: %s", moved, ", ".join(sorted(dead)))

    def _take_back_expired(self) -> None:
        spared = self._spares_leases()
        expired = self._read(lambda connection: leases.expired(connection, _LIMIT, known_dead=spared))
        for held in expired:
            if self._spares_leases() != spared:
                # the store was away a moment ago, and what it said before does not count: the next round asks anew
                return
            self._lost(held)

    def _spares_leases(self) -> bool:
        """Whether only those whose end is known have lost their claims."""
        return time.monotonic() < self._leases_count_at

    def _lost(self, held: Claim) -> None:
        """Close an attempt whose worker renews its lease no more."""
        what = f"{held.rollout_id}: the worker {held.owner} was lost in stage {held.stage}, attempt {held.attempt}"
        patience = Patience(self._settings.retry_s, self._settings.node_timeout_s)

        def end(connection: Connection) -> Ending | None:
            if not leases.is_expired(connection, held):
                return None
            return failures.end_attempt(connection, held, Failure(Outcome.LOST, what), verdict(Outcome.LOST), patience)

        ending = self._write(end)
        if ending is not None:
            self._lost_at[held.node] = time.monotonic()
            log.warning("%s (%s)", ending.failure.message, ending.in_words)
            if ending.again_in_s is None:
                self._signals.ended(held.batch_id)

    def _ring_again(self) -> None:
        again_s = self._settings.ring_again_s
        bells = self._read(lambda connection: placement.any_unheard(connection)) and self._write(
            lambda connection: placement.unheard(connection, again_s, _LIMIT)
        )
        if bells:
            log.info("ringing again for %d stages that nobody took", len(bells))
            self._ring(bells)

    def _ring(self, bells: Sequence[Bell]) -> None:
        """Ring, and count nothing against those whom the broker did not reach: they are rung again as soon as ever."""
        if in_vain := bells[ring(self._app, bells) :]:
            again_s = self._settings.ring_again_s
            self._write(lambda connection: placement.rung_in_vain(connection, in_vain, again_s))

    def _admit(self) -> bool:
        """Give waiting rollouts to nodes with room; whether more than a lone one is under way."""
        room = self._room()
        n_free = sum(room.values())
        if not n_free:
            # a full farm: nobody looks at what waits, however much it is
            return True
        # one more than there is room for, to know whether any is left
        waits = self._read(partial(placement.waiting, limit=n_free + 1))
        if not waits:
            return False
        bells = [
            Bell(rollout_id, attempt, stage, node)
            for (rollout_id, attempt, stage), node in zip(
                self._chosen(waits, n_free), seats(room, self._shaken()), strict=False
            )
        ]
        if bells:
            again_s = self._settings.ring_again_s
            self._write(lambda connection: placement.place(connection, bells, again_s))
            self._ring(bells)
        return sum(wait.n_waiting for wait in waits) > 1

    def _room(self) -> dict[str, int]:
        """Node → how many more rollouts it takes."""
        placed = self._read(placement.occupied)
        up = [
            node
            for node in self._read(nodes.listing)
            if node.state == nodes.UP and node.heartbeat_age_s < self._settings.node_timeout_s
        ]
        self._note_sick(up)
        # where the well ones have gone, those that are left are tried again before their time
        none_takes = not any(node.takes for node in up)
        takes = {node.node: min(node.room, nodes.PROBES) if none_takes else node.takes for node in up}
        return {name: max(0, n - placed.get(name, 0)) for name, n in takes.items()}

    def _note_sick(self, up: Sequence[Node]) -> None:
        """Say once of each time that a node is taken out, and that it is back."""
        sick = {node.node: (node.n_trips, node.sick_why) for node in up if node.n_trips}
        for node in up:
            if node.n_trips and sick[node.node] != self._sick.get(node.node):
                log.warning("node %s takes nothing for %.0f s: %s", node.node, node.sick_s, node.sick_why)
            elif node.node in self._sick and not node.n_trips:
                log.warning("node %s takes as much as before again", node.node)
        self._sick = sick

    def _shaken(self) -> set[str]:
        """Nodes that lost a worker a moment ago: it starts again, or hangs. That very loss makes them the emptiest."""
        since = time.monotonic() - _SHAKEN_S
        self._lost_at = {node: at for node, at in self._lost_at.items() if at > since}
        return set(self._lost_at)

    def _chosen(self, waits: Sequence[Waiting], room: int) -> Iterator[tuple[str, int, Stage]]:
        """Of more batches than there is room for, those go first among equals that were served longest ago."""
        in_turn = sorted(waits, key=lambda wait: self._served.get(wait.batch_id, 0))
        given = shares(in_turn, room)
        served = {wait.batch_id: self._served.get(wait.batch_id, 0) for wait in waits}
        self._served = served | dict.fromkeys(given, max(served.values(), default=0) + 1)
        for batch_id, share in given.items():
            yield from self._read(partial(placement.next_of, batch_id=batch_id, limit=share))


def shares(waits: Sequence[Waiting], room: int) -> dict[str, int]:
    """How many rollouts of each batch to admit: higher priority first, then evenly over what each has under way.

    A lower priority gets nothing while a higher one waits. Of equals, the first ones get more.
    """
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
    lowest = [(wait.n_placed, place, wait) for place, wait in enumerate(waits) if wait.n_waiting]
    heapq.heapify(lowest)
    while room > 0 and lowest:
        level, place, wait = heapq.heappop(lowest)
        up_to = lowest[0][0] - level if lowest else room
        step = min(room, max(1, up_to), wait.n_waiting - given[wait.batch_id])
        given[wait.batch_id] += step
        room -= step
        if given[wait.batch_id] < wait.n_waiting:
            heapq.heappush(lowest, (level + step, place, wait))
    return {batch_id: share for batch_id, share in given.items() if share}


def seats(room: Mapping[str, int], shaken: Collection[str] = ()) -> Iterator[str]:
    """Node names, the emptiest first and those that are shaken last, one for each place there is."""
    left = {node: n for node, n in room.items() if n > 0}
    while left:
        node = max(left, key=lambda name: (name not in shaken, left[name]))
        left[node] -= 1
        if not left[node]:
            del left[node]
        yield node
