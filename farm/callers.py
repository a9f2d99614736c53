"""API keys, the callers that use them, and the audit log."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum

from farm.errors import Forbidden

KEY_NAME = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$"
ADMIN_NAME = "admin"
"""The name of the built-in key: FARM_API_KEY, or the one in FARM_HOME."""


class Scope(StrEnum):
    """A right of a key. Every scope includes `read`; `admin` includes all."""

    READ = "read"
    """See everything in the farm except keys."""
    SUBMIT = "submit"
    """Submit batches; stream and acknowledge; cancel and rescore batches submitted with the same key."""
    OPERATE = "operate"
    """Add and drain engines, update their weights; cancel and rescore anybody's batches."""
    ADMIN = "admin"
    """Create and revoke keys; read the audit log."""

    @property
    def rank(self) -> int:
        """The position in which scopes are listed."""
        return list(Scope).index(self)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A named key without its text: only the client has that, and the store holds its hash.

    `max_open` limits the unfinished rollouts submitted with the key, `max_engines` the engines added with it,
    `max_rate` its requests per second at each API process. None: no limit of its own.
    """

    name: str
    scopes: tuple[Scope, ...]
    max_open: int | None = None
    max_engines: int | None = None
    max_rate: float | None = None
    created_by: str = ""
    created_at: float = 0.0


@dataclass(frozen=True, slots=True)
class LoggedOrder:
    """One entry of the audit log: `by` is the name of a key, or the user of a process with database access."""

    number: int
    at: float
    by: str
    verb: str
    target: str
    details: str


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a verb: an API key, or a user with access to the database, who may do everything."""

    name: str
    scopes: tuple[Scope, ...] = (Scope.ADMIN,)
    max_open: int | None = None
    max_engines: int | None = None

    def may(self, scope: Scope) -> bool:
        """Return whether the caller's scopes include this one."""
        return scope in self.scopes or Scope.ADMIN in self.scopes or scope is Scope.READ

    def check(self, *scopes: Scope) -> None:
        """Raise Forbidden unless the caller's scopes include one of these."""
        if not any(map(self.may, scopes)):
            has = ", ".join(scope.value for scope in self.scopes)
            needed = " or ".join(scope.value for scope in scopes)
            raise Forbidden(f"key {self.name!r} has the scope {has}, and this needs {needed}")


def caller_of(key: ApiKey) -> Caller:
    return Caller(key.name, key.scopes, key.max_open, key.max_engines)


def sorted_scopes(scopes: Sequence[Scope]) -> tuple[Scope, ...]:
    """Return the scopes without duplicates, the weakest first."""
    return tuple(sorted(set(scopes), key=lambda scope: scope.rank))


_caller: ContextVar[Caller | None] = ContextVar("farm_caller", default=None)


def current_caller() -> Caller:
    """Return the caller of this context; by default the operating system's user, who has database access."""
    return _caller.get() or Caller(_user())


@contextmanager
def acting_for(caller: Caller) -> Iterator[None]:
    """Run the block on behalf of a caller."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name[:64]
    except KeyError:
        return f"uid {os.getuid()}"
