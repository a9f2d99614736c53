"""The verbs for API keys and the audit log, which need the scope `admin`."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from farm.callers import ADMIN_NAME, KEY_NAME, ApiKey, LoggedOrder, Scope
from farm.client.request_checks import checked
from farm.records.request_values import Request

_Most = Annotated[int, Field(ge=0, le=2**31 - 1)]


def _key_name(name: str) -> str:
    if not re.fullmatch(KEY_NAME, name):
        raise ValueError("must have 1 to 64 of A-Z, a-z, 0-9, . _ @ and -, the first a letter or digit")
    if name == ADMIN_NAME:
        raise ValueError(f"{ADMIN_NAME} is reserved for the farm's own key, FARM_API_KEY or the one in FARM_HOME")
    return name


class NewKey(Request):
    """A request for a new key. Quotas of None: no limit."""

    name: Annotated[str, Field(json_schema_extra={"pattern": KEY_NAME}), AfterValidator(_key_name)]
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=16)]
    max_open: _Most | None = None
    max_engines: _Most | None = None
    max_rate: Annotated[float, Field(gt=0, le=1e9)] | None = None


class LogPruning(Request):
    """A request to remove log entries older than this number of days."""

    days: Annotated[float, Field(ge=0, le=100_000)]


class AccessControl(ABC):
    """API keys and the audit log. Raises like the verbs of `Farm`, and Forbidden."""

    def add_key(
        self,
        name: str,
        scopes: Sequence[Scope | str],
        *,
        max_open: int | None = None,
        max_engines: int | None = None,
        max_rate: float | None = None,
    ) -> str:
        """Create a key and return its text, which is shown only once: the farm keeps its hash.

        Raises InvalidRequest, and Conflict if the name exists.
        """
        quotas = {"max_open": max_open, "max_engines": max_engines, "max_rate": max_rate}
        return self.add(checked(NewKey, {"name": name, "scopes": list(scopes), **quotas}))

    @abstractmethod
    def add(self, new: NewKey) -> str:
        """Create a key and return its text. Raises Conflict."""

    @abstractmethod
    def keys(self) -> Sequence[ApiKey]:
        """Return the keys by name, without their texts and without the farm's own."""

    @abstractmethod
    def revoke_key(self, name: str) -> None:
        """Revoke a key: within seconds every API refuses it. Raises NotFound."""

    @abstractmethod
    def orders(self, limit: int = 100, before: int | None = None) -> Sequence[LoggedOrder]:
        """Return the newest log entries, newest first, or the newest before that number; at most 1,000 at a time."""

    @abstractmethod
    def prune_orders(self, days: float) -> int:
        """Remove log entries older than `days`; return their number. The log keeps the newest 200,000 in any case."""
