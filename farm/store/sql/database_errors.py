"""Database errors: which of them are retryable, how they are reported, and how an outage is logged."""

from __future__ import annotations

import logging
import math
import re
import sqlite3
import time
from enum import Enum, auto

from sqlalchemy.exc import TimeoutError as NoConnectionLeft

from farm.errors import StoreUnavailable

log = logging.getLogger(__name__)

LOCK_WAITED = "55P03"
"""The Postgres error code for a lock timeout."""
_LOG_INTERVAL_S = (1.0, 30.0)
"""Seconds until an outage is logged, first and then again."""


class RetryableFailure(Enum):
    """The reason the same statements may succeed later."""

    AWAY = auto()
    """The database itself is unavailable: its disk is full, it has no connection left, it is locked as a whole."""
    BROKEN = auto()
    """The connection broke, or was ended."""
    CONFLICT = auto()
    """Another transaction conflicted, or there was too little memory or time for this one."""


_LOGIN = "check the user and the password in the address, and percent-encode special characters"
_REFUSALS = tuple(
    (re.compile(pattern), f"the database refuses the connection ({what}): {remedy}")
    for pattern, what, remedy in (
        ("(password|peer|ident|SCRAM|LDAP|GSSAPI|certificate) authentication failed", "user or password", _LOGIN),
        ("no password supplied|SASL authentication failed|wrong password", "user or password", _LOGIN),
        ('FATAL: +role ".*" (does not exist|is not permitted to log in)', "user", _LOGIN),
        ("no such user", "user", _LOGIN),
        ('FATAL: +database ".*" does not exist', "no such database", "create it, or name another in the address"),
        ("no such database", "no such database", "create it, or name another in the address"),
        ("no pg_hba.conf entry|pg_hba.conf rejects", "pg_hba.conf", "allow this host, user and database there"),
        ("permission denied for database", "no right to connect", "GRANT CONNECT to the user"),
        ("is not currently accepting connections", "closed to connections", "ALTER DATABASE … ALLOW_CONNECTIONS true"),
        (
            "invalid response to SSL negotiation|expected authentication request|unsupported frontend protocol",
            "the server is not a Postgres",
            "check the host and the port in the address",
        ),
        ("server does not support SSL", "no TLS", "leave out sslmode=require, or switch TLS on in the server"),
        (
            "invalid (port number|sslmode value|connection option|URI)|invalid integer value",
            "the address",
            "correct it",
        ),
    )
)
_SQLITE_AWAY = ("locked", "busy", "disk I/O", "unable to open", "disk is full")
_AWAY = {"25006", "58030"}
"""Read-only, such as a standby before its promotion; and a failing disk."""
_CONFLICTS = {"53200", "55P03", "57014"}
"""Too little memory; a lock timeout; a statement timeout."""


def retryable_failure(error: BaseException) -> RetryableFailure | None:
    """Return the reason a retry may succeed; None if it will not."""
    orig = getattr(error, "orig", None) or error
    state = getattr(orig, "sqlstate", None)
    if isinstance(error, NoConnectionLeft):
        return RetryableFailure.AWAY
    if isinstance(orig, sqlite3.OperationalError):
        return RetryableFailure.AWAY if any(word in str(orig) for word in _SQLITE_AWAY) else None
    if state is not None:
        if state[:2] == "40" or state in _CONFLICTS:
            return RetryableFailure.CONFLICT
        if state[:2] == "53" or state in _AWAY:
            return RetryableFailure.AWAY
    broken = getattr(error, "connection_invalidated", False) or (state or "")[:2] in {"08", "57"}
    return RetryableFailure.BROKEN if broken or (state is None and _is_operational(orig)) else None


def _is_operational(error: BaseException) -> bool:
    """Return whether the error is about the connection: drivers have classes of their own, for example for timeouts."""
    return any(kind.__name__ == "OperationalError" for kind in type(error).__mro__)


def refusal(error: BaseException) -> str:
    """Return why a database permanently refuses connections, and the remedy; empty if it may accept one later.

    libpq has no error codes before a session begins, so this matches the English messages of servers.
    """
    message = first_line(error)
    return next((remedy for pattern, remedy in _REFUSALS if pattern.search(message)), "")


def waited_for_lock(error: BaseException) -> bool:
    """Return whether the database gave up waiting for a lock that another transaction holds."""
    return getattr(getattr(error, "orig", None), "sqlstate", None) == LOCK_WAITED


def unavailable(error: BaseException) -> StoreUnavailable:
    """Return the error for a caller whose time is over."""
    return StoreUnavailable(f"the database does not answer: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """Return the first line of a database's error message, without the statement."""
    return str(getattr(error, "orig", None) or error).partition("\n")[0]


class Outage:
    """Logs the begin and the end of a database outage."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._since = math.inf
        self._say_at = math.inf
        self._logged = False

    @property
    def lasts(self) -> bool:
        return self._since < math.inf

    def noticed(self, error: BaseException) -> None:
        now = time.monotonic()
        if not self.lasts:
            self._since, self._say_at = now, now + _LOG_INTERVAL_S[0]
        elif now >= self._say_at:
            self._say_at, self._logged = now + _LOG_INTERVAL_S[1], True
            log.warning("Database does not answer; %s wait for it: %s", self._what, first_line(error))

    def over(self) -> None:
        if self.lasts:
            since, self._since = self._since, math.inf
            if self._logged:
                self._logged = False
                log.warning("Database answers again; %s waited %.0f s", self._what, time.monotonic() - since)
