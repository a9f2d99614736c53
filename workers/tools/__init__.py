"""The common parts of the tools: argument validation, the required sandbox, the assembly of output."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from farm.errors import ToolError
from workers.plugins.interfaces import Sandbox

_MAX_COMPLAINTS = 5
_MAX_SHOWN_CHARS = 60

_EXPECTED = {
    "missing": "required, but missing",
    "string_type": "must be text, a JSON string, not {given}",
    "int_type": "must be a whole number, not {given}",
    "int_parsing": "must be a whole number, not {given}",
    "int_from_float": "must be a whole number, not {given}",
    "finite_number": "must be a finite number, not {given}",
    "float_type": "must be a number, not {given}",
    "float_parsing": "must be a number, not {given}",
    "bool_type": "must be true or false, not {given}",
    "bool_parsing": "must be true or false, not {given}",
    "list_type": "must be a JSON array, not {given}",
}
"""Messages for the model by pydantic's error types; other errors keep pydantic's message."""


def _plain_schema(schema: dict[str, Any], of: type[BaseModel]) -> None:
    """Drop what models do not need and some LLM servers refuse: titles, and null as an optional's type."""
    schema.pop("title", None)
    schema.pop("description", None)
    schema.setdefault("properties", {})
    for argument in schema["properties"].values():
        argument.pop("title", None)
        kinds = [kind for kind in argument.get("anyOf", ()) if kind != {"type": "null"}]
        if len(kinds) == 1:
            del argument["anyOf"]
            argument.update(kinds[0])
        if argument.get("default", ...) is None:
            del argument["default"]


class Arguments(BaseModel):
    """The arguments of a tool. Unknown ones are refused; null stands for a missing optional one.

    Errors are worded for the model, for any input; all texts are then valid Unicode.
    """

    model_config = ConfigDict(extra="forbid", json_schema_extra=_plain_schema)

    @model_validator(mode="wrap")
    @classmethod
    def _validated(cls, given: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(given, cls):
            return given
        if not isinstance(given, dict):
            raise _refusal(cls, [((), _no_object(given))])
        sent = {name: value for name, value in given.items() if name in cls.model_fields}
        unknown = _unknown([name for name in given if name not in sent], cls)
        try:
            checked = check(_without_nulls(cls, sent))
        except ValidationError as error:
            wrong = [(details["loc"], _worded(details)) for details in error.errors(include_url=False)]
            raise _refusal(cls, [*unknown, *wrong]) from None
        if wrong := [*unknown, *_broken_texts(checked)]:
            raise _refusal(cls, wrong)
        return checked


_Complaint = tuple[tuple[int | str, ...], str]
"""A path in the arguments, and the error there."""


def _refusal(model: type[BaseModel], complaints: list[_Complaint]) -> ValidationError:
    shown = complaints[:_MAX_COMPLAINTS]
    if len(complaints) > len(shown):
        shown.append(((), "there is more wrong with them"))
    errors = [
        InitErrorDetails(type=PydanticCustomError("argument", "{text}", {"text": text}), loc=location, input=None)
        for location, text in shown
    ]
    return ValidationError.from_exception_data(model.__name__, errors)


def _without_nulls(model: type[BaseModel], sent: Mapping[str, Any]) -> dict[str, Any]:
    required = {name for name, field in model.model_fields.items() if field.is_required()}
    return {name: value for name, value in sent.items() if value is not None or name in required}


def _no_object(given: Any) -> str:
    try:
        inner = json.loads(given) if isinstance(given, str) else None
    except (ValueError, RecursionError):
        inner = None
    if isinstance(inner, dict):
        return "they are a JSON object inside a string; send the object itself"
    return f"must be one JSON object, not {_shown(given)}"


def _unknown(names: list[str], model: type[BaseModel]) -> list[_Complaint]:
    if not names:
        return []
    known = list(model.model_fields)
    complaints: list[_Complaint] = [((), f"the tool takes {', '.join(f'`{name}`' for name in known) or 'none'}")]
    for name in names[:_MAX_COMPLAINTS]:
        close = difflib.get_close_matches(name[:_MAX_SHOWN_CHARS], known, n=1)
        complaints.append(((_shown_name(name),), f"unknown; did you mean `{close[0]}`?" if close else "unknown"))
    return complaints


def _worded(details: ErrorDetails) -> str:
    if details["type"] == "literal_error":
        return f"must be one of {details['ctx']['expected']}, not {_shown(details['input'])}"
    words = _EXPECTED.get(details["type"])
    return words.format(given=_shown(details["input"])) if words else details["msg"]


def _broken_texts(arguments: BaseModel) -> Iterator[_Complaint]:
    for name, value in arguments:
        try:
            value.encode() if isinstance(value, str) else None
        except UnicodeEncodeError as error:
            half = ascii(value[error.start])
            yield (name,), f"holds {half}, half of a pair of surrogates, which is no character; write the character"


def _shown(value: Any) -> str:
    """Return a value in a form that the model recognises, in ASCII, truncated if long."""
    if isinstance(value, dict | list) and value:
        return "an object" if isinstance(value, dict) else "an array"
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "..."


def _shown_name(name: str) -> str:
    return name if name.isidentifier() and len(name) <= _MAX_SHOWN_CHARS else _shown(name)


def needed(sandbox: Sandbox | None, tool: str) -> Sandbox:
    """Return the sandbox. Raises ToolError if the rollout has none."""
    if sandbox is None:
        raise ToolError(f"`{tool}` cannot be used here: this problem has no sandbox.")
    return sandbox


def out_of_time(timeout_s: float, more: str) -> str:
    """Return the last line of the output of a call that was cut off."""
    return f"[stopped: it did not finish within {timeout_s:g} seconds; {more}]"


def lines(*parts: str) -> str:
    """Join the non-empty parts of an observation by line breaks."""
    return "\n".join(part.rstrip("\n") for part in parts if part.strip("\n"))
