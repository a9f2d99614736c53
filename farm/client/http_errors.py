"""Errors over HTTP: one table maps the classes of `farm.errors` to status codes and bodies, and back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from farm.client import serialization
from farm.errors import (
    BrokerUnavailable,
    Conflict,
    FarmUnreachable,
    Forbidden,
    InvalidRequest,
    NotAllowed,
    NotFound,
    Overloaded,
    Pruned,
    SandboxEnded,
    ServiceError,
    StoreUnavailable,
    StoreWentBack,
    UnknownHandler,
    UsageError,
)

log = logging.getLogger(__name__)

_KINDS: dict[str, type[UsageError] | type[ServiceError]] = {
    kind.__name__: kind
    for kind in (
        UsageError,
        InvalidRequest,
        UnknownHandler,
        NotFound,
        Conflict,
        StoreWentBack,
        NotAllowed,
        Pruned,
        SandboxEnded,
        Forbidden,
        ServiceError,
        StoreUnavailable,
        BrokerUnavailable,
        FarmUnreachable,
        Overloaded,
    )
}
"""Errors sent by name; the status is the class's, unless HTTP has a more specific one."""


@dataclass(frozen=True, slots=True)
class ProblemDetails:
    """The body of an error response: `kind` is the name of an error class."""

    status: int
    kind: str
    message: str
    field: str = ""
    more: Sequence[tuple[str, str]] = ()
    """Further faults of the request, as (field, message)."""

    def body(self) -> bytes:
        error = {"kind": self.kind, "message": self.message, "field": self.field}
        return serialization.written({"error": error | ({"more": list(self.more)} if self.more else {})})


def problem_of(error: Exception) -> ProblemDetails:
    """Return the error response for an exception. Details of unexpected ones only go to the log."""
    if isinstance(error, InvalidRequest):
        (field, message), *more = error.complaints
        return ProblemDetails(error.status, "InvalidRequest", message, field, more)
    if isinstance(error, UsageError | ServiceError):
        return ProblemDetails(error.status, type(error).__name__, str(error))
    log.error("Request handler failed", exc_info=error)
    return ProblemDetails(500, "ServiceError", f"request handler failed ({type(error).__name__}): see the API's log")


def error_of(data: bytes) -> UsageError | ServiceError | None:
    """Return the error of a response body; None if it is not a farm's."""
    error = _error_in(data)
    kind = _KINDS.get(str(error.get("kind")))
    if kind is None:
        return None
    if kind is InvalidRequest:
        return InvalidRequest(str(error.get("message")), field=str(error.get("field") or ""), more=_more(error))
    return kind(str(error.get("message")))


def _more(error: dict[str, Any]) -> list[tuple[str, str]]:
    more = error.get("more")
    pairs = more if isinstance(more, list) else []
    return [(str(pair[0]), str(pair[1])) for pair in pairs if isinstance(pair, list) and len(pair) == 2]


def _error_in(data: bytes) -> dict[str, Any]:
    try:
        body = serialization.parsed(data)
    except ValueError:
        return {}
    error = body.get("error") if isinstance(body, dict) else None
    return error if isinstance(error, dict) else {}
