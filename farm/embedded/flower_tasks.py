"""Readable rows of Flower's task list: the rollout and its attempt, and one line about the end of the stage.

Celery's events hold representations of Python objects: a result in quotes, an exception as its constructor, arguments
with the batch and the stage, which the rollout and the task name already. Flower's list shows no exceptions at all.

The list is reconciled with the store, which knows what task events did not report. A killed worker sends no event, and
events are lost while the broker is down. Flower would show such tasks as running forever. So each open task is looked
up, and ends like its stage did.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from typing import Any

from farm.errors import FarmError
from farm.records.rollout import State
from farm.scheduler.broker import named_stage
from farm.settings import settings
from farm.store.database import Store
from farm.store.reports.stage_ends import AttemptStage, StageEnd, stage_ends

LONGEST = 200
"""Characters of a result; the page of the task has the exception in full."""
_EXCEPTION = re.compile(r"\w+\((?P<text>(['\"]).*\2),?\)(?P<note>.*)", re.DOTALL)
_ESCAPED = re.compile(r"\\(n|r|t|['\"\\])")

log = logging.getLogger(__name__)

PERIOD_MS = 3000
"""Milliseconds between two checks."""
_OPEN = frozenset({"PENDING", "RECEIVED", "STARTED"})
_EVENTS_S = 5.0
"""Seconds that the events of a task may take; then they count as lost."""
_EVENT_TYPES: Mapping[State, tuple[str, str]] = {
    State.COMPLETED: ("task-succeeded", "result"),
    State.FAILED: ("task-failed", "exception"),
    State.QUEUED: ("task-retried", "exception"),
    State.CANCELLED: ("task-revoked", "exception"),
}
"""The type of Celery's event for each end, and its field for the message."""


def format_task(task: Any) -> Any:
    """Change a task's arguments and result to the text of its row, and return it. Flower passes a copy."""
    stage = named_stage(task.args)
    if stage is not None:
        task.args = f"{stage.rollout_id} attempt {stage.attempt}"
    if task.exception:
        match = _EXCEPTION.fullmatch(task.exception)
        task.result = _line(_unquoted(match["text"]) + match["note"] if match else task.exception)
    elif task.result:
        task.result = _line(_unquoted(task.result))
    return task


def _unquoted(text: str) -> str:
    """Return the text of a string literal; other texts unchanged."""
    if len(text) < 2 or text[0] not in "'\"" or text[-1] != text[0]:
        return text
    return _ESCAPED.sub(lambda found: {"n": "\n", "r": "\n", "t": " "}.get(found[1], found[1]), text[1:-1])


def _line(text: str) -> str:
    first = next(filter(None, map(str.strip, text.splitlines())), "")
    return first if len(first) <= LONGEST else f"{first[: LONGEST - 1]}…"


class FlowerReconciler:
    """Looks up open tasks of a Flower in the store, and sends it the missing events.

    `events` is Flower's `Events`: its tasks by id, and the only loop that may touch them.
    """

    def __init__(self, events: Any) -> None:
        self._events = events
        self._store: Store | None = None

    async def reconcile(self) -> None:
        """Check once. If the store does not answer, the next check retries."""
        tasks = self._events.state.tasks
        opened = {task_id: task for task_id, task in list(tasks.items()) if task.state in _OPEN}
        named = {task_id: stage for task_id, task in opened.items() if (stage := named_stage(task.args)) is not None}
        if not named:
            return
        try:
            ends = await self._events.io_loop.run_in_executor(None, self._ask, set(named.values()))
        except FarmError as error:
            log.warning("State of open tasks not updated from the store: %s", error)
            return
        for task_id, stage in named.items():
            end = ends.get(stage)
            if end is not None and end.age_s > _EVENTS_S and opened[task_id].state in _OPEN:
                self._events.state.event(_event(task_id, opened[task_id], end))

    def _ask(self, stages: set[AttemptStage]) -> Mapping[AttemptStage, StageEnd]:
        if self._store is None:
            self._store = Store(settings().database_url)
        return self._store.read(lambda connection: stage_ends(connection, stages))


def _event(task_id: str, task: Any, end: StageEnd) -> dict[str, Any]:
    """Return Celery's event for an end. Without `local_received` it is no sign of life of the task's worker."""
    kind, field = _EVENT_TYPES[end.state]
    hostname = task.worker.hostname if task.worker is not None else "store"
    where = {"uuid": task_id, "hostname": hostname, "clock": task.clock or 0, "local_received": 0}
    return where | {"type": kind, "timestamp": time.time(), field: f"{end.message} (says the store)"}
