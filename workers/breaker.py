"""Whether the stages that one worker process plays fail so often that its node must be at fault.

A window of its last results, without a clock or a store: the worker tells it how stages ended, and does what it says.
"""

from __future__ import annotations

import threading
from collections import deque

_WINDOW = 16
_MIN_RESULTS = 8
_MIN_INSTANCES = 3
"""Failures of fewer instances may be theirs."""
_MIN_DOUBTED = 2
"""The same while the node is tried again: then nothing but a stage that goes well speaks for it."""


class Breaker:
    """The results of one process of the pool for `stage`; from any thread.

    `doubted` is why the node is out, or was until now, where an earlier process of this pool found it to be at fault.
    """

    def __init__(self, stage: str, doubted: str = "") -> None:
        self._stage = stage
        self._doubted = self._own(doubted)
        self._results: deque[tuple[str, str]] = deque(maxlen=_WINDOW)
        self._lock = threading.Lock()

    def went_well(self, instance: str) -> str:
        """A stage ended as it should. Why the node was in doubt, which this speaks against; empty if it was not."""
        with self._lock:
            self._results.append((instance, ""))
            return self._doubted

    def failed(self, instance: str, message: str) -> str:
        """A stage ended with an error that speaks against the node. Why to take it out; empty as long as it may stay.

        Said once: then the window begins anew.
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
        if self._doubted:
            return len(instances) >= _MIN_DOUBTED and all(complaint for _, complaint in self._results)
        n_failed = sum(bool(complaint) for _, complaint in self._results)
        enough = len(self._results) >= _MIN_RESULTS and len(instances) >= _MIN_INSTANCES
        return enough and 2 * n_failed >= len(self._results)

    def tripped(self, why: str) -> None:
        """The node was taken out for this reason."""
        with self._lock:
            self._doubted = why
            self._results.clear()

    def learn(self, before: str, doubted: str) -> None:
        """What doubt has taken the place of the one before, which `went_well` gave; empty if the node is in none."""
        with self._lock:
            if self._doubted == before:
                self._doubted = self._own(doubted)

    def _own(self, doubted: str) -> str:
        """Other pools clear their own."""
        return doubted if doubted.startswith(f"{self._stage}: ") else ""
