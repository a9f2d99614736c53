"""The verbs for keys of the API and for the log of orders, which need the scope `admin`."""

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
        raise ValueError("has up to 64 of A-Z, a-z, 0-9, . _ @ and -, the first a letter or digit")
    if name == ADMIN_NAME:
        raise ValueError(f"{ADMIN_NAME} is the farm's own key, FARM_API_KEY or that in FARM_HOME")
    return name


class NewKey(Request):
    """A key that is asked for. Quotas are None for as many as the farm takes."""

    name: Annotated[str, Field(json_schema_extra={"pattern": KEY_NAME}), AfterValidator(_key_name)]
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=16)]
    max_open: _Most | None = None
    max_engines: _Most | None = None
    max_rate: Annotated[float, Field(gt=0, le=1e9)] | None = None


class LogPruning(Request):
    """Orders that are older than so many days."""

    days: Annotated[float, Field(ge=0, le=100_000)]


class AccessControl(ABC):
    """Keys, and the log of what was ordered with them. Raises as the verbs of `Farm` do, and Forbidden."""

    def add_key(
        self,
        name: str,
        scopes: Sequence[Scope | str],
        *,
        max_open: int | None = None,
        max_engines: int | None = None,
        max_rate: float | None = None,
    ) -> str:
        """Make a key and return its text, which is shown this once: the farm keeps a hash of it.

        Raises InvalidRequest, and Conflict for the name of a key that there is.
        """
        quotas = {"max_open": max_open, "max_engines": max_engines, "max_rate": max_rate}
        return self.add(checked(NewKey, {"name": name, "scopes": list(scopes), **quotas}))

    @abstractmethod
    def add(self, new: NewKey) -> str:
        """Make a key and return its text. Raises Conflict."""

    @abstractmethod
    def keys(self) -> Sequence[ApiKey]:
        """Return the keys by name, without their texts, and without the farm's own."""

    @abstractmethod
    def revoke_key(self, name: str) -> None:
        """End a key: within seconds every API refuses it. Raises NotFound."""

    @abstractmethod
    def orders(self, limit: int = 100, before: int | None = None) -> Sequence[LoggedOrder]:
        """Return the newest orders, newest first, or the newest before one of that number; at most 1,000 at a time."""

    @abstractmethod
    def prune_orders(self, days: float) -> int:
        """Remove orders older than that from the log; how many. The newest 200,000 are kept without it."""
