"""The dispatcher: admits rollouts to nodes with room, sends lost messages again, takes work back from dead workers.

One leads at a time, by a lease; every node supervisor runs one. Two at once would do no harm, since all they write is
guarded. Admission here keeps the broker's queues short, so that losing the broker costs nothing, and keeps rollouts
that wait from holding a sandbox. While the store does not answer, no process can send heartbeats: so none is declared
dead after that until there was time to. The same holds after the store's clock has jumped: leases are compared with a
time that was read in the same round and found to agree with this process's own clock.

A standby only reads, now and then, whether another leads.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from farm.errors import StoreUnavailable
from farm.notifications import ENDED, WAKE, Signals
from farm.records.node import PROBES, UP, Node
from farm.records.rollout import Failure, Outcome, Stage
from farm.retry_policy import retry_decision
from farm.scheduler.broker import celery_app, enqueue
from farm.scheduler.fair_share import fair_shares, free_slots
from farm.scheduler.invariant_checker import InvariantChecker
from farm.settings import Settings
from farm.store import attempts, epoch, leader, leases, nodes, placement
from farm.store.attempts import AttemptEnd, RetrySettings
from farm.store.blobs import stored_archives
from farm.store.database import Store, Work
from farm.store.placement import StageMessage, WaitingBatch
from farm.store.rollouts import Claim
from farm.store.sql.clock_jumps import Timekeeper, store_time

T = TypeVar("T")
log = logging.getLogger(__name__)

ROLE = "dispatcher"
_LEASE_S = 10.0
_STANDBY_S = 2.0
"""Seconds between two checks of a standby whether another leads."""
_LEASES = 2.0
"""No lease is further ahead than so many times the longest that a node of the farm gives."""
_LIMIT = 1000
_RECENTLY_FAILED_S = 10.0
_ARCHIVES_S = 3600.0
"""Seconds between looks for task archives that no batch names any more."""
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
        self._ask_at = 0.0
        self._timekeeper = Timekeeper()
        self._seen = epoch.EpochTracker()
        self._longest_lease_s = settings.lease_s
        self._versions: set[str] = set()
        self._next_care = 0.0
        self._next_archive_sweep = time.monotonic() + _ARCHIVES_S
        self._unanswered_since = 0.0
        self._leases_count_at = math.inf
        self._heartbeats_count_at = math.inf
        self._open_breakers: dict[str, tuple[int, str]] = {}
        self._served: dict[str, int] = {}
        self._lost_at: dict[str, float] = {}
        self._invariant_checker = InvariantChecker(
            store, settings.audit_s, lambda: self._leads_until > time.monotonic()
        )

    def run(self) -> None:
        """Dispatch until stopped; wait for an unavailable database."""
        listener = self._signals.listen(WAKE, ENDED)
        # it has not seen whether the store answered until now
        self._leases_count_at = time.monotonic() + self._settings.lease_s
        self._heartbeats_count_at = time.monotonic() + self._settings.node_timeout_s
        self._invariant_checker.start()
        try:
            while not self._stopped.is_set():
                busy = False
                try:
                    busy = self._leads() and self._round()
                except StoreUnavailable as error:
                    log.warning("the dispatcher could not do its round; it will try again: %s", error)
                    self._stopped.wait(1.0)
                except Exception:
                    log.exception("the dispatcher could not do its round; it will try again")
                    self._stopped.wait(1.0)
                if busy:
                    self._stopped.wait(_PACE_S)
                listener.wait(self._settings.tick_s)
        finally:
            listener.close()
            self._invariant_checker.close()
            if self._leads_until > time.monotonic():
                with suppress(StoreUnavailable):
                    self._store.write(
                        lambda connection: leader.release_leadership(connection, ROLE, self._owner), urgent=True
                    )

    def stop(self) -> None:
        self._stopped.set()
        self._signals.wake()

    def _round(self) -> bool:
        """Run one round of dispatching; return whether more than one rollout is under way."""
        now = time.monotonic()
        if now >= self._next_care:
            self._next_care = now + self._settings.tick_s
            self._take_back()
            self._enqueue_undelivered()
        if now >= self._next_archive_sweep:
            self._next_archive_sweep = now + _ARCHIVES_S
            if gone := self._write(stored_archives.sweep):
                log.info("task archives that no batch names any more are dropped: %s", ", ".join(gone))
        return self._admit()

    def _read(self, work: Work[T]) -> T:
        return self._answered(self._store.read, work)

    def _write(self, work: Work[T]) -> T:
        return self._answered(self._store.write, work)

    def _answered(self, ask: Callable[[Work[T]], T], work: Work[T]) -> T:
        """Return the store's answer; after a slow one, extend leases and heartbeats, which could not be renewed.

        Only the store is timed, whatever else makes a round slow: otherwise no worker would ever be declared lost. A
        query that failed counts as the start of the next one.
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
        if now > self._leads_until - _LEASE_S / 2 and now >= self._ask_at:
            led = self._leads_until < now and self._read(self._is_led)
            leads = not led and self._answered(partial(self._store.write, urgent=True), self._lead)
            self._leads_until = now + _LEASE_S if leads else 0.0
            # only what is committed was seen
            self._seen.note(self._read(epoch.current))
            self._ask_at = 0.0 if leads else now + _STANDBY_S
        return self._leads_until > now

    def _is_led(self, connection: Connection) -> bool:
        return leader.is_led_by_other(connection, ROLE, self._owner, _LEASE_S)

    def _lead(self, connection: Connection) -> bool:
        leads = leader.acquire_leadership(connection, ROLE, self._owner, _LEASE_S)
        if leads:
            epoch.go_on(connection, self._seen.last)
        return leads

    def _take_back(self) -> None:
        """Requeue the rollouts of dead workers and dead nodes."""
        known = self._read(nodes.listing)
        self._note_versions(known)
        self._longest_lease_s = max([self._settings.lease_s, *(node.lease_s for node in known)])
        self._take_back_expired(self._time())
        placed = self._read(placement.occupied)
        timeout_s = self._settings.node_timeout_s if time.monotonic() >= self._heartbeats_count_at else math.inf
        dead = placed.keys() - {node.node for node in known if node.heartbeat_age_s < timeout_s}
        if dead:
            moved = self._write(lambda connection: placement.requeue_of_dead_nodes(connection, dead))
            if moved:
                log.warning("%d queued rollouts were taken off dead nodes: %s", moved, ", ".join(sorted(dead)))

    def _time(self) -> float:
        """Return the store's time; if it has jumped, extend all leases and heartbeats."""
        now, jump_s = self._timekeeper.read(lambda: self._read(store_time))
        if jump_s:
            at = time.monotonic()
            self._leases_count_at = at + self._longest_lease_s
            self._heartbeats_count_at = at + self._settings.node_timeout_s
        return now

    def _take_back_expired(self, now: float) -> None:
        spared, longest_s = self._spares_leases(), _LEASES * self._longest_lease_s
        expired = self._read(lambda connection: leases.expired(connection, _LIMIT, spared, now, longest_s))
        for held in expired:
            if self._spares_leases() != spared:
                # the store was just unavailable, so its earlier answer does not count: the next round reads anew
                return
            self._lost(held, 0.0 if spared else now, longest_s)

    def _spares_leases(self) -> bool:
        """Return whether expired leases are still spared, so only workers known to have ended lose their claims."""
        return time.monotonic() < self._leases_count_at

    def _lost(self, held: Claim, now: float, longest_s: float) -> None:
        """Close an attempt whose worker no longer renews its lease."""
        what = f"{held.rollout_id}: the worker {held.owner} was lost in stage {held.stage}, attempt {held.attempt}"
        retry_settings = RetrySettings(self._settings.retry_s, self._settings.node_timeout_s)

        def end(connection: Connection) -> AttemptEnd | None:
            if not leases.is_expired(connection, held, now, math.inf if now == 0.0 else longest_s):
                return None
            return attempts.end_attempt(
                connection, held, Failure(Outcome.LOST, what), retry_decision(Outcome.LOST), retry_settings
            )

        ending = self._answered(partial(self._store.write, batch_id=held.batch_id, rollout_id=held.rollout_id), end)
        if ending is not None:
            self._lost_at[held.node] = time.monotonic()
            log.warning("%s (%s)", ending.failure.message, ending.in_words)
            if ending.again_in_s is None:
                self._signals.ended(held.batch_id)

    def _enqueue_undelivered(self) -> None:
        again_s = self._settings.ring_again_s
        stage_messages = self._read(lambda connection: placement.any_undelivered(connection)) and self._write(
            lambda connection: placement.undelivered(connection, again_s, _LIMIT)
        )
        if stage_messages:
            log.info("sending the messages of %d stages again, as no worker took them", len(stage_messages))
            self._enqueue(stage_messages)

    def _enqueue(self, stage_messages: Sequence[StageMessage]) -> None:
        """Send messages; those that the broker did not take are sent again after the first, shortest pause."""
        if in_vain := stage_messages[enqueue(self._app, stage_messages) :]:
            again_s = self._settings.ring_again_s
            self._write(lambda connection: placement.mark_unsent(connection, in_vain, again_s))

    def _admit(self) -> bool:
        """Place waiting rollouts on nodes with room; return whether more than one is under way."""
        chosen, n_waiting = self._read(self._choose)
        stage_messages = [
            StageMessage(rollout_id, attempt, stage, node) for (rollout_id, attempt, stage), node in chosen
        ]
        if stage_messages:
            again_s = self._settings.ring_again_s
            self._write(lambda connection: placement.place(connection, stage_messages, again_s))
            self._enqueue(stage_messages)
        return n_waiting > 1

    def _choose(self, connection: Connection) -> tuple[list[tuple[tuple[str, int, Stage], str]], float]:
        """Return the rollouts to place, each with its node, and how many wait; without any room that is not counted."""
        room = self._room(connection)
        n_free = sum(room.values())
        if not n_free:
            # a full farm: the waiting rollouts are not read, however many there are
            return [], math.inf
        # one more than there is room for, to know whether any is left
        waits = placement.waiting(connection, n_free + 1)
        if not waits:
            return [], 0
        chosen = zip(
            self._chosen(connection, waits, n_free), free_slots(room, self._recently_failed_nodes()), strict=False
        )
        return list(chosen), sum(wait.n_waiting for wait in waits)

    def _room(self, connection: Connection) -> dict[str, int]:
        """Return node → how many more rollouts it takes."""
        placed = placement.occupied(connection)
        up = [
            node
            for node in nodes.listing(connection)
            if node.state == UP and node.heartbeat_age_s < self._settings.node_timeout_s
        ]
        self._log_breakers(up)
        # if no healthy node is left, the others are tried again before their time
        none_takes = not any(node.takes for node in up)
        takes = {node.node: min(node.room, PROBES) if none_takes else node.takes for node in up}
        return {name: max(0, n - placed.get(name, 0)) for name, n in takes.items()}

    def _log_breakers(self, up: Sequence[Node]) -> None:
        """Log once each time that a node is taken out of service, and that it is back."""
        sick = {node.node: (node.n_trips, node.sick_why) for node in up if node.n_trips}
        for node in up:
            if node.n_trips and sick[node.node] != self._open_breakers.get(node.node):
                log.warning("node %s takes nothing for %.0f s: %s", node.node, node.sick_s, node.sick_why)
            elif node.node in self._open_breakers and not node.n_trips:
                log.warning("node %s takes as much as before again", node.node)
        self._open_breakers = sick

    def _note_versions(self, known: Sequence[Node]) -> None:
        """Say once of each mixture that the nodes do not all have the same code."""
        versions = {node.version for node in known if node.version}
        if len(versions) > 1 and versions != self._versions:
            log.warning("the nodes of this farm have different versions: %s", ", ".join(sorted(versions)))
        self._versions = versions

    def _recently_failed_nodes(self) -> set[str]:
        """Return nodes that just lost a worker, which restarts or hangs; that very loss makes them the emptiest."""
        since = time.monotonic() - _RECENTLY_FAILED_S
        self._lost_at = {node: at for node, at in self._lost_at.items() if at > since}
        return set(self._lost_at)

    def _chosen(
        self, connection: Connection, waits: Sequence[WaitingBatch], room: int
    ) -> Iterator[tuple[str, int, Stage]]:
        """Yield rollouts to place. Without room for all batches, of equals the least recently served go first."""
        in_turn = sorted(waits, key=lambda wait: self._served.get(wait.batch_id, 0))
        result = fair_shares(in_turn, room)
        served = {wait.batch_id: self._served.get(wait.batch_id, 0) for wait in waits}
        self._served = served | dict.fromkeys(result, max(served.values(), default=0) + 1)
        for batch_id, share in result.items():
            yield from placement.next_of(connection, batch_id, share)
