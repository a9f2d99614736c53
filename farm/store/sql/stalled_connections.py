"""A watchdog that breaks connections to a frozen server, which would block forever.

The kernel keeps a connection to a stopped server healthy, so no network timeout helps. After a while without an answer,
a second connection is tried. If the server answers there, the statement is just slow, and its own time limit applies.
If not, the first connection is shut down, which its user sees as a broken connection.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection

log = logging.getLogger(__name__)

_MIN_S = 1.0
_CHECK_INTERVAL_S = 0.25
_CANCEL_S = 5.0


@dataclass(slots=True, eq=False)
class _WatchedConnection:
    """A connection in use, checked at `look_at` and again each `limit_s`."""

    connection: Any
    limit_s: float
    look_at: float = field(default=0.0)


class StallMonitor:
    """Watches the connections of one store, in a thread that lives while any of them is in use for long."""

    def __init__(self, answers: Callable[[], bool]) -> None:
        self._answers = answers
        self._uses: set[_WatchedConnection] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watched(self, connection: Connection, limit_s: float) -> Iterator[None]:
        """Break the connection if the body takes longer than `limit_s` and the server answers on no other either."""
        limit_s = max(_MIN_S, limit_s)
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
        connection.cancel_safe(timeout=_CANCEL_S)
