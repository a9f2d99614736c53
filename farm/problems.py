"""Errors on the wire: the tree of `farm.errors` as HTTP statuses with a body, and back, by one table."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from farm import wire
from farm.errors import (
    BrokerUnavailable,
    Conflict,
    FarmUnreachable,
    InvalidRequest,
    NotAllowed,
    NotFound,
    Overloaded,
    ServiceError,
    StoreUnavailable,
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
        NotAllowed,
        ServiceError,
        StoreUnavailable,
        BrokerUnavailable,
        FarmUnreachable,
        Overloaded,
    )
}
"""What crosses the wire by its name; its status is its class's own, unless HTTP has a finer one."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a request is not answered: `kind` is an error of the farm's, by its name."""

    status: int
    kind: str
    message: str
    field: str = ""

    def body(self) -> bytes:
        return wire.written({"error": {"kind": self.kind, "message": self.message, "field": self.field}})


def problem_of(error: Exception) -> Problem:
    """What a client is told. What the farm did not raise on purpose is told in the log alone."""
    if isinstance(error, InvalidRequest):
        return Problem(error.status, "InvalidRequest", str(error).removeprefix(f"{error.field}: "), error.field)
    if isinstance(error, UsageError | ServiceError):
        return Problem(error.status, type(error).__name__, str(error))
    log.error("answering a request broke", exc_info=error)
    return Problem(500, "ServiceError", f"answering broke ({type(error).__name__}): the API's log says where")


def error_of(data: bytes) -> UsageError | ServiceError | None:
    """The error that an answer stands for; None if no API of a farm gave it."""
    told = _told(data)
    kind = _KINDS.get(str(told.get("kind")))
    if kind is None:
        return None
    if kind is InvalidRequest:
        return InvalidRequest(str(told.get("message")), field=str(told.get("field") or ""))
    return kind(str(told.get("message")))


def _told(data: bytes) -> dict[str, Any]:
    try:
        body = wire.parsed(data)
    except ValueError:
        return {}
    told = body.get("error") if isinstance(body, dict) else None
    return told if isinstance(told, dict) else {}
