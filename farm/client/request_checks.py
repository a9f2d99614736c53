"""Checks of a request where it comes in, before anything of it is stored: every complaint at once, by field."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from farm.errors import InvalidRequest
from farm.plugins import installed
from farm.records.request import BatchRequest, roles_missing

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


def field_complaints(instance_type: type[BaseModel], fields: Mapping[str, Any], path: str) -> Sequence[tuple[str, str]]:
    try:
        instance_type.model_validate(fields)
    except ValidationError as error:
        return invalid(error, path).complaints
    except Exception as error:
        return [(path, f"its handler could not read it: {type(error).__name__}: {error}")]
    return ()


def role_complaints(
    handler_type: Callable[[], Any], fields: Mapping[str, Any], roles: Collection[str], data_source: str, path: str
) -> Sequence[tuple[str, str]]:
    """Return what is wrong with the roles of a batch for an instance whose fields are sound."""
    if not hasattr(handler_type, "roles"):
        return ()
    try:
        handler = handler_type()
        missing = [role for role in handler.roles(handler.instance_type.model_validate(fields)) if role not in roles]
    except Exception as error:
        return [(path, f"its handler's roles() broke: {type(error).__name__}: {error}")]
    return [(path, roles_missing(data_source, missing))] if missing else ()


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
