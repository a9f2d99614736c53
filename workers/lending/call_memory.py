"""The calls of one sandbox by id: the running ones, and the results of the last ones that have ended."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

MAX_REMEMBERED = 128
MAX_BYTES = 32_000_000
"""Maximum size of the remembered results. The last one is remembered however large it is."""


class CallMemory:
    """Used on the event loop."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, asyncio.Task[Any]] = OrderedDict()

    def get(self, call_id: str) -> asyncio.Task[Any] | None:
        """Return the call with an id, None if there was none or it is forgotten."""
        return self._calls.get(call_id)

    def add(self, call_id: str, task: asyncio.Task[Any]) -> None:
        self._calls[call_id] = task
        task.add_done_callback(partial(self._note_end, call_id))

    def forget(self, call_ids: Iterable[str]) -> None:
        """Forget those of some calls that have ended."""
        for call_id in call_ids:
            if (task := self._calls.get(call_id)) is not None and task.done():
                del self._calls[call_id]

    def _note_end(self, call_id: str, task: asyncio.Task[Any]) -> None:
        if call_id not in self._calls:
            return
        self._calls.move_to_end(call_id)
        n_bytes = 0
        ended = [each for each in reversed(self._calls) if self._calls[each].done()]
        for index, each in enumerate(ended):
            n_bytes += _size(self._calls[each])
            if index >= MAX_REMEMBERED or (index and n_bytes > MAX_BYTES):
                del self._calls[each]


def _size(task: asyncio.Task[Any]) -> int:
    return 0 if task.cancelled() or task.exception() is not None else _characters(task.result())


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if is_dataclass(value) and not isinstance(value, type):
        return sum(_characters(getattr(value, each.name)) for each in fields(value))
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0
