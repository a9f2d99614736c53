"""Gathers rollouts that a trainer starts one at a time into batches.

A batch for each would need a stream and a connection for each of hundreds. Rollouts with the same request are gathered
for a moment, submitted as the instances of one batch, and returned one by one as they end.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from farm.client.farm import Farm
from farm.errors import FarmError
from farm.ids import rollout_id
from farm.records.request import BatchRequest, Instance
from farm.records.rollout import Rollout

log = logging.getLogger(__name__)

_GATHER_S = 0.05


@dataclass(eq=False, slots=True)
class StartedRollout:
    """One rollout: `ended` is set when it has ended; `rollout_id` is empty until its batch is submitted."""

    instance: Instance
    ended: Future[Rollout] = field(default_factory=Future)
    rollout_id: str = ""
    abandoned: bool = False

    def end(self, rollout: Rollout) -> None:
        with suppress(InvalidStateError):
            self.ended.set_result(rollout)

    def fail(self, error: BaseException) -> None:
        with suppress(InvalidStateError):
            self.ended.set_exception(error)


class GatheredRollouts:
    """The rollouts that one trainer has started on a farm. Safe to use from several threads."""

    def __init__(self, client: Farm) -> None:
        self.client = client
        self._lock = threading.Lock()
        self._gathered: dict[str, list[StartedRollout]] = {}
        self._open: set[StartedRollout] = set()
        self._closed = False

    def start(self, instance: Instance, request: Mapping[str, Any]) -> StartedRollout:
        """Start a rollout of an instance; `request` has the other fields of its batch.

        `ended` receives the rollout, or the error that prevented its start.
        """
        started = StartedRollout(instance)
        key = json.dumps(request, sort_keys=True, default=repr)
        with self._lock:
            if self._closed:
                raise RuntimeError("the connection to the farm is closed")
            self._open.add(started)
            gathered = self._gathered.setdefault(key, [])
            gathered.append(started)
            if len(gathered) == 1:
                timer = threading.Timer(_GATHER_S, self._submit, (key, dict(request)))
                timer.daemon = True
                timer.start()
        started.ended.add_done_callback(lambda _: self._open.discard(started))
        return started

    def abandon(self, started: StartedRollout) -> None:
        """Cancel a rollout whose result is no longer needed, in the background."""
        _in_background(self._abandon, started)

    def close(self) -> None:
        """Cancel all unfinished rollouts. Waits for them fail."""
        with self._lock:
            self._closed = True
            left = list(self._open)
        for started in left:
            self._abandon(started)

    def _submit(self, key: str, request: dict[str, Any]) -> None:
        with self._lock:
            gathered = self._gathered.pop(key)
        self._run_batch(gathered, request)

    def _run_batch(self, batch: Sequence[StartedRollout], request: dict[str, Any]) -> None:
        """Submit a batch and return its rollouts as they end. Each batch runs in its own thread."""
        try:
            instances = tuple(started.instance for started in batch)
            batch_id = self.client.submit(BatchRequest(instances=instances, **request))
        except (FarmError, ValueError) as error:
            if len(batch) == 1:
                batch[0].fail(error)
            else:
                # one invalid instance does not affect the others
                for started in batch:
                    _in_background(self._run_batch, [started], request)
            return
        except Exception as error:
            _fail_all(batch, error)
            return
        for index, started in enumerate(batch):
            started.rollout_id = rollout_id(batch_id, index, 0)
            if started.abandoned:
                self._abandon(started)
        try:
            for rollout in self.client.stream(batch_id):
                batch[rollout.group_index].end(rollout)
        except Exception as error:
            _fail_all(batch, error)

    def _abandon(self, started: StartedRollout) -> None:
        started.abandoned = True
        started.fail(RuntimeError("it was abandoned"))
        if started.rollout_id:
            try:
                self.client.cancel(started.rollout_id)
            except FarmError as error:
                log.warning("Rollout %s was not cancelled: %s", started.rollout_id, error)


def _fail_all(batch: Sequence[StartedRollout], error: Exception) -> None:
    for started in batch:
        started.fail(error)


def _in_background(call: Callable[..., None], *values: Any) -> None:
    threading.Thread(target=call, args=values, daemon=True).start()
