"""State that a protocol keeps between requests, in the store, so that every API process sees it.

It is a log of records, each written once after the one before it, like the steps of a training run: if two API
processes change it at the same moment, one is first, and the other starts over from the new record.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from farm.client.runs import Runs
from farm.errors import Conflict, ServiceError

_TRIES = 50
_MARK = "mark"


class KeptState:
    """A record by name, `{}` before its first change. A name has up to 64 of A-Z, a-z, 0-9, `.`, `_`, `:` and `-`."""

    def __init__(self, runs: Runs, name: str) -> None:
        self._runs = runs
        self._name = name

    def read(self) -> Mapping[str, Any]:
        return self._newest()[1]

    def change(self, to: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Replace the record by `to(record)`, and return it. `to` may be called again, and may raise."""
        mark = secrets.token_hex(8)
        for _ in range(_TRIES):
            step, record = self._newest()
            changed = to(record)
            if changed == record:
                return record
            try:
                written = self._runs.record_step(self._name, step + 1, {**changed, _MARK: mark})
            except Conflict:
                continue
            if written.record.get(_MARK) == mark:
                return changed
        raise ServiceError(f"{self._name} was changed by others {_TRIES} times: retry")

    def _newest(self) -> tuple[int, Mapping[str, Any]]:
        recorded = self._runs.recorded_step(self._name)
        if recorded is None:
            return 0, {}
        return recorded.step, {name: value for name, value in recorded.record.items() if name != _MARK}
