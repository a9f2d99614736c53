"""The circuit breaker of a node: it opens if so many stages of one worker process fail that the node is at fault.

`CircuitBreaker` is a window of the last results, without a clock or a store; `NodeBreaker` acts on its decisions.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from functools import partial

from sqlalchemy import Connection

from farm.notifications import Signals
from farm.store import nodes, placement
from farm.store.database import Store

log = logging.getLogger(__name__)

_WINDOW = 16
_MIN_RESULTS = 8
_MIN_INSTANCES = 3
"""Minimum number of failed instances, because fewer failures may be caused by the instances."""
_MIN_ON_TRIAL = 2
"""The same while the node is on trial: then only a successful stage closes the breaker."""


class CircuitBreaker:
    """The results of one process of the pool for `stage`; from any thread.

    `reason` is that of an open breaker, or of one on trial. It counts if an earlier process of this pool gave it.
    """

    def __init__(self, stage: str, reason: str = "") -> None:
        self._stage = stage
        self._reason = self._own(reason)
        self._results: deque[tuple[str, str]] = deque(maxlen=_WINDOW)
        self._lock = threading.Lock()

    def record_success(self, instance: str) -> str:
        """Record a successful stage. Returns the reason of the open breaker, which it refutes; empty if closed."""
        with self._lock:
            self._results.append((instance, ""))
            return self._reason

    def record_failure(self, instance: str, message: str) -> str:
        """Record a failure that the node may have caused. Returns the reason to open the breaker, or empty.

        A reason is returned once; the window then restarts.
        """
        with self._lock:
            self._results.append((instance, message))
            failed = [each for each, complaint in self._results if complaint]
            if not self._at_fault(set(failed)):
                return ""
            n_results = len(self._results)
            self._results.clear()
        return f"{self._stage}: {len(failed)} of {n_results} stages failed, the last with: {message}"

    def _at_fault(self, instances: set[str]) -> bool:
        if self._reason:
            return len(instances) >= _MIN_ON_TRIAL and all(complaint for _, complaint in self._results)
        n_failed = sum(bool(complaint) for _, complaint in self._results)
        enough = len(self._results) >= _MIN_RESULTS and len(instances) >= _MIN_INSTANCES
        return enough and 2 * n_failed >= len(self._results)

    def trip(self, why: str) -> None:
        """Record that the breaker was opened for this reason."""
        with self._lock:
            self._reason = why
            self._results.clear()

    def learn(self, before: str, reason: str) -> None:
        """Replace the reason `before`, from `record_success`, by the store's; empty if the breaker is closed."""
        with self._lock:
            if self._reason == before:
                self._reason = self._own(reason)

    def _own(self, reason: str) -> str:
        """Return the reason if this pool gave it; other pools clear their own."""
        return reason if reason.startswith(f"{self._stage}: ") else ""


class NodeBreaker:
    """Opens and closes a node's breaker in the store, by the results of one process of the pool for `stage`."""

    def __init__(self, store: Store, signals: Signals, stage: str, node: str, node_timeout_s: float) -> None:
        self._store = store
        self._signals = signals
        self._node = node
        self._node_timeout_s = node_timeout_s
        self._window = CircuitBreaker(stage, store.read(partial(nodes.breaker_reason, node=node)))

    def record_success(self, instance: str) -> None:
        """Record a successful stage; close the breaker if that refutes its reason."""
        why = self._window.record_success(instance)
        if not why:
            return
        closed, left = self._store.write(partial(self._close, why=why))
        self._window.learn(why, left)
        if closed:
            log.warning("Node %s is back in service at full capacity", self._node)
            self._signals.wake()

    def _close(self, connection: Connection, why: str) -> tuple[bool, str]:
        """Return whether the breaker is closed now, and the reason if it is still open."""
        return nodes.close_breaker(connection, self._node, why), nodes.breaker_reason(connection, self._node)

    def record_failure(self, instance: str, message: str) -> None:
        """Record a failure that the node may have caused; open the breaker if there are too many."""
        why = self._window.record_failure(instance, message)
        if not why:
            return
        out_s = self._store.write(partial(self._open, why=why))
        if out_s is None:
            log.warning("Node %s stays in service despite failures (%s): no other node is healthy", self._node, why)
        elif out_s:
            self._window.trip(why)
            log.warning("Node %s is out of service for %.0f s: %s", self._node, out_s, why)
            self._signals.wake()

    def _open(self, connection: Connection, why: str) -> float | None:
        """Take the node out of service, and move its rollouts that have not started elsewhere."""
        out_s = nodes.open_breaker(connection, self._node, why, self._node_timeout_s)
        if out_s:
            placement.requeue_unstarted(connection, self._node)
        return out_s
