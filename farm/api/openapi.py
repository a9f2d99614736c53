"""The API's description of itself, `/openapi.json` (OpenAPI 3.1), from the types that its routes read and write."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.metadata import version
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import BaseModel

from farm.api.endpoints import EVENTS, JSON, Endpoint

_REF = "#/components/schemas/"
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}


def description(endpoints: Mapping[tuple[str, str], Endpoint]) -> dict[str, Any]:
    """Return the OpenAPI description of these endpoints."""
    schemas: dict[str, Any] = {"Problem": _PROBLEM}
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), described in endpoints.items():
        paths.setdefault(path, {})[method.lower()] = _operation(path, described, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "rollout farm", "version": version("rollout-farm")},
        "security": [{name: []} for name in _SCHEMES],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": _SCHEMES},
    }


_SCHEMES = {
    "key": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    "password": {"type": "http", "scheme": "basic", "description": "The key is the password."},
}
_TEXT = {"type": "string"}
_IN_PATHS = {"digest": {"type": "string", "pattern": "^[0-9a-f]{64}$"}}
_PROBLEM = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["kind", "message", "field"],
            "properties": {
                **dict.fromkeys(("kind", "message", "field"), _TEXT),
                "more": {"type": "array", "items": {"type": "array", "items": _TEXT, "minItems": 2, "maxItems": 2}},
            },
        }
    },
}
_REFUSALS = {
    400: "The request is invalid; `field` names the place.",
    401: "The key is missing or unknown.",
    403: "The key's scopes or quotas, or the state of the object, do not allow it.",
    404: "The object does not exist.",
    408: "The body did not come in time.",
    409: "It conflicts with the present state.",
    410: "The object was removed.",
    413: "The body is too large.",
    415: "The body is not declared to be JSON.",
    429: "The key's rate is used up: wait for `Retry-After`.",
    503: "The farm cannot answer now: retry.",
}


def _operation(path: str, described: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _IN_PATHS.get(name, _TEXT)}
        for name in re.findall(r"{(\w+)}", path)
    ]
    if described.query is not None:
        query_schema = _model(described.query, schemas)
        for name, schema in query_schema.get("properties", {}).items():
            parameters.append(
                {"name": name, "in": "query", "required": name in query_schema.get("required", ()), "schema": schema}
            )
    answer = {
        "description": "Done.",
        "content": {described.media_type: {"schema": _schema(described.returns, schemas)}},
    }
    if described.media_type == EVENTS:
        parameters.append({"name": "Last-Event-ID", "in": "header", "required": False, "schema": _TEXT})
    operation: dict[str, Any] = {"summary": described.summary, "responses": {"200": answer, **_refusals(described)}}
    if described.scope is None:
        operation["security"] = []
    else:
        scopes = described.scope if isinstance(described.scope, tuple) else (described.scope,)
        operation["x-scopes"] = [scope.value for scope in scopes]
    if parameters:
        operation["parameters"] = parameters
    if described.body is not None:
        body = {"content": {JSON: {"schema": _schema(described.body, schemas)}}, "required": True}
        operation["requestBody"] = body
    return operation


def _refusals(described: Endpoint) -> dict[str, Any]:
    """Return the error responses, whose bodies are all alike; 500, an internal error, is `default`."""
    content = {JSON: {"schema": {"$ref": f"{_REF}Problem"}}}
    statuses = [status for status in _REFUSALS if described.body is not None or status not in (408, 413, 415)]
    responses: dict[str, Any] = {
        str(status): {"description": _REFUSALS[status], "content": content} for status in statuses
    }
    return responses | {"default": {"description": "Answering broke.", "content": content}}


def _schema(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type as serialized; types with fields are added to `schemas`."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"type": "string", "enum": [each.value for each in kind]}
    if origin is np.ndarray:
        return {
            "type": "string",
            "contentEncoding": "base64",
            "description": "an array, packed as farm.records.packed_array",
        }
    if origin in (Union, UnionType):
        return {"anyOf": [{"type": "null"} if part is NoneType else _schema(part, schemas) for part in parts]}
    if origin is Literal:
        return {"enum": list(parts)}
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return {"type": "array", "items": _schema(parts[0], schemas)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema(parts[1], schemas)}
    if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, BaseModel)):
        if kind.__name__ not in schemas:
            # registered first, as a type may contain itself
            schemas[kind.__name__] = {}
            schemas[kind.__name__] = _model(kind, schemas) if issubclass(kind, BaseModel) else _record(kind, schemas)
        return {"$ref": f"{_REF}{kind.__name__}"}
    if kind is bytes:
        return {"type": "string", "format": "binary"}
    if kind is Any:
        return {}
    raise TypeError(f"{kind} has no schema: add it here")


def _record(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    types = get_type_hints(kind)
    properties = {each.name: _schema(types[each.name], schemas) for each in fields(kind)}
    return {"type": "object", "description": kind.__doc__ or "", "properties": properties, "required": list(properties)}


def _model(kind: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    schema = kind.model_json_schema(ref_template=f"{_REF}{{model}}")
    schemas.update(schema.pop("$defs", {}))
    return schema
