"""An asynchronous producer: keeps waves in flight while the trainer trains."""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import Self

from farm.collecting.step_collector import StepCollector
from farm.errors import FarmError, InvalidRequest

log = logging.getLogger(__name__)


class Producer:
    """Keeps a run's waves in flight until it is closed: `with Producer(collector):` around the training.

    A thread takes ended groups and requests more, so that `max_inflight_groups` are always in flight. It stops when the
    groups in flight and waiting suffice for the next `max_staleness` steps: more would become too old. Its errors are
    logged, and it retries; the trainer's own `collect` raises them. Raises InvalidRequest if the options leave nothing
    to carry over.
    """

    def __init__(self, collector: StepCollector, *, poll_s: float = 0.5) -> None:
        if not collector.options.carries_over:
            raise InvalidRequest(
                "must be 'carry_over': groups produced in advance would be cancelled", field="leftovers"
            )
        self._collector = collector
        self._poll_s = poll_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._produce, name="farm-producer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Groups in flight continue, and are carried over."""
        self._closed.set()
        self._thread.join()

    def _produce(self) -> None:
        last_error = ""
        while not self._closed.is_set():
            try:
                self._collector.keep_ahead()
                last_error = ""
            except Exception as error:
                if str(error) != last_error:
                    # errors of a sampler or of the trainer's own rule are bugs
                    is_bug = not isinstance(error, FarmError)
                    log.warning("Production ahead of the trainer is paused: %s", error, exc_info=is_bug)
                last_error = str(error)
            self._closed.wait(self._poll_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
