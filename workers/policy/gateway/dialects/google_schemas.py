"""Converts Google's schemas, OpenAPI schemas with upper-case types, to JSON schemas."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NUMBERS = frozenset(
    {"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "minimum", "maximum"}
)
_OF_THE_VENDOR = frozenset({"nullable", "propertyOrdering", "example"})
_NAMES = {"defs": "$defs", "ref": "$ref"}
_NULL = {"type": "null"}
_DEPTH = 64
_SNAKE = re.compile(r"_([a-z])")


def camel(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object with its keys in camel case; the API accepts snake case, too."""
    return {_SNAKE.sub(lambda match: match[1].upper(), name): value for name, value in given.items()}


def json_schema(given: object, depth: int = 0) -> dict[str, Any] | None:
    """Return a schema as a JSON schema; None for an invalid one."""
    if not isinstance(given, dict) or depth > _DEPTH:
        return None
    given = camel(given)
    result = {
        _NAMES.get(name, name): _field(_NAMES.get(name, name), value, depth)
        for name, value in given.items()
        if name not in _OF_THE_VENDOR
    }
    if given.get("nullable") is not True:
        return result
    if isinstance(result.get("type"), str):
        return result | {"type": [result["type"], "null"]}
    if isinstance(result.get("anyOf"), list):
        return result | {"anyOf": [*result["anyOf"], _NULL]}
    if "$ref" in result:
        return {name: value for name, value in result.items() if name != "$ref"} | {
            "anyOf": [{"$ref": result["$ref"]}, _NULL]
        }
    return result


def _field(name: str, value: Any, depth: int) -> Any:
    if name == "type" and isinstance(value, str):
        return value.lower()
    if name == "$ref" and isinstance(value, str):
        return value.replace("#/defs/", "#/$defs/")
    if name in ("properties", "$defs") and isinstance(value, dict):
        return {each: json_schema(schema, depth + 1) or {} for each, schema in value.items()}
    if name in ("items", "additionalProperties") and isinstance(value, dict):
        return json_schema(value, depth + 1) or {}
    if name in ("anyOf", "oneOf", "allOf") and isinstance(value, list):
        return [json_schema(each, depth + 1) or {} for each in value]
    if name in _NUMBERS and isinstance(value, str) and value.lstrip("-").isascii() and value.lstrip("-").isdecimal():
        # The API writes 64-bit integers as text.
        return int(value)
    return value
