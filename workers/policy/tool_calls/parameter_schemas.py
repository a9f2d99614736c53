"""Types of tool parameters, for formats that write their values as plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from workers.policy.tool_calls.tool_call import UNREADABLE

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Tool to parameter to its JSON schema."""

_WORDS = {"true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null"}


def schemas(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Return the parameter schemas of tools as the OpenAI API describes them."""
    functions = [tool.get("function") or {} for tool in tools]
    return {
        str(function.get("name")): (function.get("parameters") or {}).get("properties") or {} for function in functions
    }


def as_json(value: str, schema: Mapping[str, Any] | None) -> str:
    """Return the JSON text of a parameter that was written as plain text.

    With a schema, a value that may be a string is one, and any other is parsed if it is JSON. Without, only objects and
    arrays are parsed: a tool that expects a number accepts it as a string, but not vice versa.
    """
    kinds = _kinds(schema) if schema is not None else set()
    bare = value.strip()
    if "string" in kinds:
        return "null" if "null" in kinds and bare == "null" else _string(value)
    if not kinds:
        return bare if bare.startswith(("{", "[")) and _is_json(bare) else _string(value)
    if bare in _WORDS:
        return _WORDS[bare]
    return bare if _is_json(bare) else _string(value)


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema allows; empty if it names none."""
    named = schema.get("type")
    kinds = {named} if isinstance(named, str) else {each for each in named or () if isinstance(each, str)}
    for choice in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
        kinds |= _kinds(choice)
    return kinds


def _string(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except UNREADABLE:
        return False
    return True
