"""The dispatcher: admits rollouts to nodes with capacity, resends lost messages, requeues the work of dead workers.

Borrowed sandboxes take slots as rollouts do: waiting ones take turns with batches, and they end with their lease.

One process leads at a time, by a lease; every node supervisor runs a dispatcher. Two leaders would do no harm, since
all their writes are guarded. Admission here keeps the broker's queues short, so that losing the broker costs nothing,
and waiting rollouts hold no sandbox. While the store does not answer, no process can send heartbeats. So after an
outage, nodes and workers get a full timeout before they count as dead. The same holds after a jump of the store's
clock: leases are compared with a time that was read in the same round and agrees with this process's own clock.

A standby only reads, now and then, whether another leads.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from farm.errors import StoreUnavailable
from farm.notifications import ENDED, WAKE, Signals
from farm.observing.observer import Observer
from farm.observing.periodic_thread import PeriodicThread
from farm.observing.webhook_sender import WebhookSender
from farm.records.node import PROBES, UP, Node
from farm.records.rollout import Failure, Outcome
from farm.retry_policy import retry_decision
from farm.scheduler.admissions import Admission, Admissions
from farm.scheduler.background_work import InvariantChecker, RetentionKeeper
from farm.scheduler.broker import celery_app, enqueue
from farm.settings import Settings
from farm.store import attempts, borrowed_sandboxes, epoch, leader, leases, nodes, placement
from farm.store.attempts import AttemptEnd, RetrySettings
from farm.store.blobs import stored_archives
from farm.store.database import Store, Work
from farm.store.placement import StageMessage
from farm.store.rollouts import Claim
from farm.store.sql.clock import Timekeeper, store_time

T = TypeVar("T")
log = logging.getLogger(__name__)

ROLE = "dispatcher"
_LEASE_S = 10.0
_STANDBY_S = 2.0
"""Seconds between a standby's checks whether another leads."""
_LEASES = 2.0
"""The limit of a lease's end, as a multiple of the longest lease that a node of the farm gives."""
_LIMIT = 1000
_RECENTLY_FAILED_S = 10.0
_SWEEP_S = 3600.0
"""Seconds between cleanups: of task archives that no batch uses, and of sandboxes that ended long ago."""
_MOST_SKIPPED = 100
_RETRY_S = 1.0
_PERIOD_S = 0.02
"""The minimum time between rounds of a busy farm: ends within it are handled together. A single rollout never waits."""


def rest_s(took_s: float, tick_s: float) -> float:
    """Return the pause between rounds of a busy farm, after a round that took `took_s`.

    It is as long as the round, so that a thousand nodes, whose free slots last for seconds, leave half a processor
    free; but at most a tick: a round that waited for the database must be followed by another at once.
    """
    return max(_PERIOD_S, min(took_s, tick_s))


class Dispatcher:
    """`run` until `stop`. `owner` is the process's name in the leader's lease; `clock` is in seconds."""

    def __init__(
        self,
        store: Store,
        signals: Signals,
        settings: Settings,
        owner: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._signals = signals
        self._settings = settings
        self._owner = owner
        self._app = celery_app(settings.broker_url, "farm-dispatcher")
        self._clock = clock
        self._stopped = threading.Event()
        self._leads_until = 0.0
        self._ask_at = 0.0
        self._waits = True
        self._n_hints = 0
        self._timekeeper = Timekeeper()
        self._seen = epoch.EpochTracker()
        self._longest_lease_s = settings.lease_s
        self._versions: set[str] = set()
        self._next_care = 0.0
        self._next_sweep = clock() + _SWEEP_S
        self._unanswered_since = 0.0
        self._leases_count_at = math.inf
        self._heartbeats_count_at = math.inf
        self._open_breakers: dict[str, tuple[int, str]] = {}
        self._lost_at: dict[str, float] = {}
        self._admissions = Admissions()
        # without a signature, anybody's message would be accepted as one of the farm's own
        webhook_url = settings.webhook_url if settings.webhook_secret else ""
        self._threads: Sequence[PeriodicThread] = (
            InvariantChecker(store, settings.audit_s, self._is_leading),
            RetentionKeeper(store, settings, self._is_leading),
            Observer(store, self._is_leading, settings.otel_endpoint, webhook_url),
            WebhookSender(store, self._is_leading, settings.webhook_secret),
        )

    def run(self) -> None:
        """Dispatch until stopped; wait for an unavailable database."""
        listener = self._signals.listen(WAKE, ENDED)
        # it does not know yet whether the store answered until now
        self._leases_count_at = time.monotonic() + self._settings.lease_s
        self._heartbeats_count_at = time.monotonic() + self._settings.node_timeout_s
        for thread in self._threads:
            thread.start()
        try:
            while not self._stopped.is_set():
                busy, began = False, self._clock()
                try:
                    busy = self.run_round()
                except StoreUnavailable as error:
                    log.warning("Dispatcher round failed; retrying: %s", error)
                    self._stopped.wait(_RETRY_S)
                except Exception:
                    log.exception("Dispatcher round failed; retrying")
                    self._stopped.wait(_RETRY_S)
                if busy:
                    self._stopped.wait(rest_s(self._clock() - began, self._settings.tick_s))
                listener.wait(self._settings.tick_s, self.is_due)
        finally:
            listener.close()
            for thread in self._threads:
                thread.close()
            if self._is_leading():
                with suppress(StoreUnavailable):
                    self._store.write(
                        lambda connection: leader.release_leadership(connection, ROLE, self._owner), urgent=True
                    )

    def _is_leading(self) -> bool:
        return self._leads_until > self._clock()

    def is_due(self, channel: str, _: str) -> bool:
        """Return whether a hint is a reason for a round: the end of a rollout is none while no other waits."""
        self._n_hints += 1
        # a listener treats too many messages at once as a flood
        return channel != ENDED or self._waits or self._n_hints % _MOST_SKIPPED == 0

    def stop(self) -> None:
        self._stopped.set()
        self._signals.wake()

    def run_round(self) -> bool:
        """Run one round, unless another dispatcher leads; return whether more than one rollout is under way."""
        return self._leads() and self._round()

    def _round(self) -> bool:
        now = self._clock()
        if now >= self._next_care:
            self._next_care = now + self._settings.tick_s
            self._take_back()
            self._enqueue_undelivered()
        if now >= self._next_sweep:
            self._next_sweep = now + _SWEEP_S
            self._write(borrowed_sandboxes.forget_ended)
            if digests := self._write(stored_archives.sweep):
                log.info("Deleted task archives without a batch: %s", ", ".join(digests))
        return self._admit()

    def _read(self, work: Work[T]) -> T:
        return self._answered(self._store.read, work)

    def _write(self, work: Work[T]) -> T:
        return self._answered(self._store.write, work)

    def _answered(self, ask: Callable[[Work[T]], T], work: Work[T]) -> T:
        """Return the store's answer; after a slow one, extend leases and heartbeats, which could not be renewed.

        Only the store is timed, not other slow parts of a round: otherwise no worker would ever be declared lost. After
        a failed query, timing begins with the next one.
        """
        self._unanswered_since = self._unanswered_since or time.monotonic()
        answer = ask(work)
        now = time.monotonic()
        waited_s, self._unanswered_since = now - self._unanswered_since, 0.0
        if waited_s > self._settings.lease_s / 2:
            self._leases_count_at = now + self._settings.lease_s
        if waited_s > self._settings.node_timeout_s / 2:
            self._heartbeats_count_at = now + self._settings.node_timeout_s
            log.warning("Store did not answer for %.0f s; nodes get a full timeout to renew heartbeats", waited_s)
        return answer

    def _leads(self) -> bool:
        now = self._clock()
        if now > self._leads_until - _LEASE_S / 2 and now >= self._ask_at:
            led = self._leads_until < now and self._read(self._is_led)
            leads = not led and self._answered(partial(self._store.write, urgent=True), self._lead)
            self._leads_until = now + _LEASE_S if leads else 0.0
            # only committed data was seen
            self._seen.note(self._read(epoch.current))
            self._ask_at = 0.0 if leads else now + _STANDBY_S
        return self._leads_until > now

    def _is_led(self, connection: Connection) -> bool:
        return leader.is_led_by_other(connection, ROLE, self._owner, _LEASE_S)

    def _lead(self, connection: Connection) -> bool:
        leads = leader.acquire_leadership(connection, ROLE, self._owner, _LEASE_S)
        if leads:
            epoch.advance(connection, self._seen.last)
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
        self._end_borrowed(dead)
        if dead:
            moved = self._write(lambda connection: placement.requeue_of_dead_nodes(connection, dead))
            if moved:
                log.warning("Requeued %d queued rollouts of dead nodes: %s", moved, ", ".join(sorted(dead)))

    def _end_borrowed(self, dead: Collection[str]) -> None:
        """End borrowed sandboxes of dead nodes, and those with an expired lease: their borrowers may be dead."""
        ended: list[str] = []
        if dead:
            lost = f"its node was lost: {', '.join(sorted(dead))}"
            ended += self._write(lambda connection: borrowed_sandboxes.end_on(connection, dead, lost))
        if not self._spares_leases() and self._read(borrowed_sandboxes.any_expired):
            ended += self._write(borrowed_sandboxes.end_expired)
        if ended:
            log.warning("Ended %d borrowed sandboxes: %s", len(ended), ", ".join(ended[:5]))
            self._signals.sandboxes()
        for sandbox_id in ended:
            self._signals.ended(sandbox_id)

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
                # the store was unavailable just now, so its earlier answer is outdated: the next round reads it again
                return
            self._lost(held, 0.0 if spared else now, longest_s)

    def _spares_leases(self) -> bool:
        """Return whether expired leases are still ignored: then only workers known to have ended lose claims."""
        return time.monotonic() < self._leases_count_at

    def _lost(self, held: Claim, now: float, longest_s: float) -> None:
        """Close an attempt whose worker no longer renews its lease."""
        message = f"{held.rollout_id}: the worker {held.owner} was lost in stage {held.stage}, attempt {held.attempt}"
        retry_settings = RetrySettings(self._settings.retry_s, self._settings.node_timeout_s)

        def end(connection: Connection) -> AttemptEnd | None:
            if not leases.is_expired(connection, held, now, math.inf if now == 0.0 else longest_s):
                return None
            return attempts.end_attempt(
                connection, held, Failure(Outcome.LOST, message), retry_decision(Outcome.LOST), retry_settings
            )

        ending = self._answered(partial(self._store.write, batch_id=held.batch_id, rollout_id=held.rollout_id), end)
        if ending is not None:
            self._lost_at[held.node] = time.monotonic()
            log.warning("%s (%s)", ending.failure.message, ending.in_words)
            if ending.again_in_s is None:
                self._signals.ended(held.batch_id)

    def _enqueue_undelivered(self) -> None:
        again_s = self._settings.resend_after_s
        stage_messages = self._read(lambda connection: placement.any_undelivered(connection)) and self._write(
            lambda connection: placement.undelivered(connection, again_s, _LIMIT)
        )
        if stage_messages:
            log.info("Sending %d stage messages again: no worker has taken them", len(stage_messages))
            self._enqueue(stage_messages)

    def _enqueue(self, stage_messages: Sequence[StageMessage]) -> None:
        """Send messages; those that the broker did not take are sent again after the first, shortest pause."""
        if unsent := stage_messages[enqueue(self._app, stage_messages) :]:
            again_s = self._settings.resend_after_s
            self._write(lambda connection: placement.mark_unsent(connection, unsent, again_s))

    def _admit(self) -> bool:
        """Place waiting rollouts on nodes with free slots; return whether more than one is under way."""
        self._waits = True
        chosen, n_waiting = self._read(self._choose)
        self._waits = n_waiting > 0
        stage_messages = [
            StageMessage(*each.stage_of_attempt, each.node) for each in chosen if each.stage_of_attempt is not None
        ]
        if stage_messages:
            again_s = self._settings.resend_after_s
            self._write(lambda connection: placement.place(connection, stage_messages, again_s))
            self._enqueue(stage_messages)
        if lent := {each.sandbox_id: each.node for each in chosen if each.sandbox_id}:
            self._write(lambda connection: borrowed_sandboxes.place(connection, lent))
            self._signals.sandboxes()
        return n_waiting > 1

    def _choose(self, connection: Connection) -> tuple[list[Admission], float]:
        up = [
            node
            for node in nodes.listing(connection)
            if node.state == UP and node.heartbeat_age_s < self._settings.node_timeout_s
        ]
        return self._admissions.choose(connection, up, self._room(connection, up), self._recently_failed_nodes())

    def _room(self, connection: Connection, up: Sequence[Node]) -> dict[str, int]:
        placed = placement.occupied(connection)
        self._log_breakers(up)
        # if no healthy node is left, the others are tried early
        none_takes = not any(node.takes for node in up)
        takes = {node.node: min(node.room, PROBES) if none_takes else node.takes for node in up}
        return {name: max(0, n - placed.get(name, 0)) for name, n in takes.items()}

    def _log_breakers(self, up: Sequence[Node]) -> None:
        """Log once when a node is taken out of service, and when it is back."""
        out_of_service = {node.node: (node.n_trips, node.out_of_service_why) for node in up if node.n_trips}
        for node in up:
            if node.n_trips and out_of_service[node.node] != self._open_breakers.get(node.node):
                log.warning(
                    "Node %s is out of service for %.0f s: %s",
                    node.node,
                    node.out_of_service_s,
                    node.out_of_service_why,
                )
            elif node.node in self._open_breakers and not node.n_trips:
                log.warning("Node %s is back at full capacity", node.node)
        self._open_breakers = out_of_service

    def _note_versions(self, known: Sequence[Node]) -> None:
        """Log once for each mixture if the nodes do not all have the same version."""
        versions = {node.version for node in known if node.version}
        if len(versions) > 1 and versions != self._versions:
            log.warning("Nodes have different versions: %s", ", ".join(sorted(versions)))
        self._versions = versions

    def _recently_failed_nodes(self) -> set[str]:
        """Return nodes that just lost a worker, which restarts or hangs: the loss itself makes them the emptiest."""
        since = time.monotonic() - _RECENTLY_FAILED_S
        self._lost_at = {node: at for node, at in self._lost_at.items() if at > since}
        return set(self._lost_at)
