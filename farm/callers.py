"""Keys of the API, callers that showed one, and the log of their orders."""

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
"""The name of the key that is always there: FARM_API_KEY, or that in FARM_HOME."""


class Scope(StrEnum):
    """A right that a key may have. Each of the others has `read` in it, and `admin` all."""

    READ = "read"
    """See all that is in the farm, keys aside."""
    SUBMIT = "submit"
    """Submit batches; stream and acknowledge; cancel and score again what was submitted with the same key."""
    OPERATE = "operate"
    """Add and drain engines, update their weights; cancel and score again what anybody submitted."""
    ADMIN = "admin"
    """Make and revoke keys; read the log of orders."""

    @property
    def rank(self) -> int:
        """Its place in the order in which keys are listed."""
        return list(Scope).index(self)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A named key without its text, which only the client has; the store holds a hash of it.

    `max_open` is of rollouts that were submitted with it and have not ended, `max_engines` of engines that were added
    with it, `max_rate` of its requests per second at each API process. None: as many as the farm takes.
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
    """One order in the log: `by` the name of a key, or the user of a process that has the database."""

    number: int
    at: float
    by: str
    verb: str
    target: str
    details: str


@dataclass(frozen=True, slots=True)
class Caller:
    """The one that a verb is done for: a key of the API, or a user who has the database itself and may do all."""

    name: str
    scopes: tuple[Scope, ...] = (Scope.ADMIN,)
    max_open: int | None = None
    max_engines: int | None = None

    def may(self, scope: Scope) -> bool:
        """Return whether its scopes have this one in them."""
        return scope in self.scopes or Scope.ADMIN in self.scopes or scope is Scope.READ

    def check(self, *scopes: Scope) -> None:
        """Raise Forbidden unless its scopes have one of these in them."""
        if not any(map(self.may, scopes)):
            has = ", ".join(scope.value for scope in self.scopes)
            needed = " or ".join(scope.value for scope in scopes)
            raise Forbidden(f"key {self.name!r} has the scope {has}, and this needs {needed}")


def caller_of(key: ApiKey) -> Caller:
    return Caller(key.name, key.scopes, key.max_open, key.max_engines)


def sorted_scopes(scopes: Sequence[Scope]) -> tuple[Scope, ...]:
    """Return each scope once, the least first."""
    return tuple(sorted(set(scopes), key=lambda scope: scope.rank))


_caller: ContextVar[Caller | None] = ContextVar("farm_caller", default=None)


def current_caller() -> Caller:
    """Return the one that this context acts for; without any, the operating system's user, who has the database."""
    return _caller.get() or Caller(_user())


@contextmanager
def acting_for(caller: Caller) -> Iterator[None]:
    """Do what is in the block for a caller."""
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
