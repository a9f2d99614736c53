"""The limited database connections of a process, lent use by use: urgent uses first, then in order.

A process of a node has one connection, so all its reads and writes take turns on it. Three rules keep that safe:

* An urgent use (a lease renewal, a heartbeat) is served before everything else that waits.
* It waits at most `urgent_s` for the present use. Then the server is asked to cancel that use's statement, and a second
  later the connection is broken. Cancelled work is rolled back and repeated afterwards, as after any broken connection.
* No other use waits longer than its timeout. A query that is not retried waits a second, so that a thread with many
  queries, such as the one that renews leases, is never blocked by the work of another thread.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import TimeoutError as NoConnectionLeft

_MIN_WATCH_S = 1.0
_CHECK_INTERVAL_S = 0.25
_CANCEL_REQUEST_S = 5.0

log = logging.getLogger(__name__)

_MIN_S = 1.0
"""The minimum wait of a use for its slot, even if it is not retried."""
_CANCEL_S = 1.0
"""Seconds that a cancelled statement gets to end."""


@dataclass(slots=True, eq=False)
class _WatchedConnection:
    """A connection in use, checked at `look_at` and again each `limit_s`."""

    connection: Any
    limit_s: float
    look_at: float = field(default=0.0)


class StallMonitor:
    """Watches the connections of one store, in a thread that lives while any of them is in use for long.

    It breaks connections to a frozen server, which would block forever: the kernel keeps them healthy, so no network
    timeout helps. After a while without an answer, a second connection is tried. If the server answers there, the
    statement is just slow, and its own time limit applies. If not, the first connection is shut down, which its user
    sees as a broken connection.
    """

    def __init__(self, answers: Callable[[], bool]) -> None:
        self._answers = answers
        self._uses: set[_WatchedConnection] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watched(self, connection: Connection, limit_s: float) -> Iterator[None]:
        """Break the connection if the body takes longer than `limit_s` and the server answers on no other either."""
        limit_s = max(_MIN_WATCH_S, limit_s)
        use = _WatchedConnection(connection.connection.dbapi_connection, limit_s, time.monotonic() + limit_s)
        with self._lock:
            self._uses.add(use)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="store-stalled", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._uses.discard(use)

    def _run(self) -> None:
        idle_until = time.monotonic() + 60.0
        while True:
            time.sleep(_CHECK_INTERVAL_S)
            now = time.monotonic()
            with self._lock:
                late = [use for use in self._uses if now >= use.look_at]
                if self._uses:
                    idle_until = now + 60.0
                elif now > idle_until:
                    self._thread = None
                    return
            if late:
                self._look_at(late)

    def _look_at(self, late: list[_WatchedConnection]) -> None:
        if self._answers():
            for use in late:
                use.look_at = time.monotonic() + use.limit_s
            return
        for use in late:
            with self._lock:
                # a use that has ended since may have passed its connection to another
                if use in self._uses:
                    log.warning("Database has not answered for %.0f s; closing the connection", use.limit_s)
                    self._uses.discard(use)
                    shut(use.connection)


def shut(connection: Any) -> None:
    """Shut down a connection that another thread waits on; that thread sees it as closed by the server."""
    with suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as there:
        there.shutdown(socket.SHUT_RDWR)


def cancel(connection: Any) -> None:
    """Ask the server to cancel a connection's statement, outside any session; the statement's user gets an error."""
    with suppress(Exception):
        connection.cancel_safe(timeout=_CANCEL_REQUEST_S)


@dataclass(slots=True, eq=False)
class Slot:
    """One use of a connection. It cannot be broken until its connection is set."""

    urgent: bool
    given: threading.Event = field(default_factory=threading.Event)
    connection: Any = None
    since: float = 0.0
    cancelled: bool = False


class ConnectionSlots:
    """Allows `n_slots` uses at a time; more wait. Thread-safe."""

    def __init__(self, n_slots: int, urgent_s: float) -> None:
        self._n_free = n_slots
        self._urgent_s = urgent_s
        self._waiting: deque[Slot] = deque()
        self._used: list[Slot] = []
        self._lock = threading.Lock()

    @contextmanager
    def slot(self, left_s: float, *, urgent: bool = False) -> Iterator[Slot]:
        """Hold a slot while the body runs. Raises NoConnectionLeft (SQLAlchemy's) after waiting for `left_s`."""
        slot = Slot(urgent)
        self._enter(slot)
        try:
            if not slot.given.is_set():
                self._wait(slot, max(left_s, _MIN_S))
            yield slot
        finally:
            self._leave(slot)

    def uses(self, slot: Slot, connection: Any) -> None:
        """Set the driver's connection of a slot."""
        with self._lock:
            slot.connection = connection

    def _enter(self, slot: Slot) -> None:
        with self._lock:
            if not slot.urgent:
                self._waiting.append(slot)
            else:
                n_before = sum(each.urgent for each in self._waiting)
                self._waiting.insert(n_before, slot)
            self._give()

    def _leave(self, slot: Slot) -> None:
        with self._lock:
            slot.connection = None
            if slot.given.is_set():
                self._used.remove(slot)
                self._n_free += 1
                self._give()
            else:
                self._waiting.remove(slot)

    def _give(self) -> None:
        while self._n_free and self._waiting:
            slot = self._waiting.popleft()
            self._n_free -= 1
            self._used.append(slot)
            slot.since = time.monotonic()
            slot.given.set()

    def _wait(self, slot: Slot, left_s: float) -> None:
        if not slot.urgent:
            if not slot.given.wait(None if math.isinf(left_s) else left_s):
                raise NoConnectionLeft(f"this process used its connection for something else for {left_s:.0f} s")
            return
        wait_s = self._urgent_s
        while not slot.given.wait(wait_s):
            self._end_longest()
            wait_s = _CANCEL_S

    def _end_longest(self) -> None:
        """Cancel the oldest use, or break its connection if it was already cancelled."""
        with self._lock:
            slot = next((each for each in self._used if not each.urgent and each.connection is not None), None)
            if slot is None:
                return
            connection, used_s = slot.connection, time.monotonic() - slot.since
            if slot.cancelled:
                slot.connection = None
                shut(connection)
            else:
                # in another thread and without the lock, as it sends a request to the server
                threading.Thread(target=cancel, args=(connection,), name="store-cancel", daemon=True).start()
        log.warning(
            "Database use has taken %.0f s while a lease or heartbeat is due: it is %s, and retried afterwards",
            *(used_s, "cut off" if slot.cancelled else "cancelled"),
        )
        slot.cancelled = True
