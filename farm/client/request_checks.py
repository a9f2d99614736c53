"""Checks of a request where it comes in, before anything of it is stored: every complaint at once, by field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from farm.errors import InvalidRequest
from farm.plugins import installed
from farm.records.request import BatchRequest, roles_missing
from farm.records.task_needs import unsupported

MAX_COMPLAINTS = 20
"""The most faults of a request that are named at a time."""


def checked_request(request: BatchRequest | Mapping[str, Any]) -> BatchRequest:
    """Return the validated request. Raises InvalidRequest naming the field."""
    if isinstance(request, BatchRequest):
        return request
    try:
        return BatchRequest.model_validate(request)
    except ValidationError as error:
        raise invalid(error, "") from None


def check_plugin(group: str, name: str, field: str, any_of_them: str) -> None:
    if name != any_of_them and name not in installed(group):
        names = ", ".join(sorted(installed(group)))
        raise InvalidRequest(f"there is no {field} {name!r}; installed here: {names}", field=field)


def instance_complaints(
    handler_type: Any, fields: Mapping[str, Any], request: BatchRequest, path: str
) -> Sequence[tuple[str, str]]:
    """Return what is wrong with an instance's fields, and what it asks for that the farm or its batch does not give."""
    try:
        instance = handler_type.instance_type.model_validate(fields)
    except ValidationError as error:
        return invalid(error, path).complaints
    except Exception as error:
        return [(path, f"its handler could not read it: {type(error).__name__}: {error}")]
    complaints: list[tuple[str, str]] = []
    try:
        handler: Any = handler_type() if hasattr(handler_type, "needs") or hasattr(handler_type, "roles") else None
        if hasattr(handler, "needs"):
            # one that is bound to a rollout has no spec before it is
            spec = None if hasattr(handler, "for_task") else handler.sandbox(instance)
            reasons = unsupported(handler.needs(instance), spec, request.network)
            complaints += [(path, f"it asks for {reason}") for reason in reasons]
        if hasattr(handler, "roles"):
            missing = [role for role in handler.roles(instance) if role not in request.roles]
            complaints += [(path, roles_missing(handler.data_source, missing))] if missing else []
    except Exception as error:
        return [(path, f"its handler could not say what it needs: {type(error).__name__}: {error}")]
    return complaints


def invalid(error: ValidationError, path: str = "") -> InvalidRequest:
    """Return an error with all faults, each with the field's whole path; of very many the first."""
    complaints: list[tuple[str, str]] = []
    result = error.errors(include_url=False, include_input=False)
    inside = {each["loc"][:depth] for each in result for depth in range(len(each["loc"]))}
    for each in result:
        if each["loc"] in inside or len(complaints) == MAX_COMPLAINTS:
            # what is said of the whole, such as that nothing is left, follows from what is wrong within
            continue
        field = path
        for part in each["loc"]:
            field += f"[{part}]" if isinstance(part, int) else f".{part}"
        complaints.append((field.lstrip(".") or "request", each["msg"].removeprefix("Value error, ")))
    return InvalidRequest.of(complaints)
