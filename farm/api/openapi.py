"""The API's description of itself, `/openapi.json` (OpenAPI 3.1), from the types that its routes read and write."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from importlib.metadata import version
from types import NoneType, UnionType
from typing import Any, TypeAlias, Union, get_args, get_origin, get_type_hints

import numpy as np
from pydantic import BaseModel

JSON, TEXT, BYTES = "application/json", "text/plain", "application/octet-stream"
_REF = "#/components/schemas/"
_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}


@dataclass(frozen=True, slots=True)
class EndpointDescription:
    """One endpoint: what it does, the types of its answer, its query and its body."""

    summary: str
    returns: Any
    query: type[BaseModel] | None = None
    body: type[BaseModel] | None = None
    media_type: str = JSON


Described: TypeAlias = Mapping[tuple[str, str], EndpointDescription]
"""Endpoints by method and path; each stands beside the route that it describes."""


def description(endpoints: Described) -> dict[str, Any]:
    """Return the OpenAPI description of these endpoints."""
    schemas: dict[str, Any] = {"Problem": _PROBLEM}
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), described in endpoints.items():
        paths.setdefault(path, {})[method.lower()] = _operation(path, described, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "rollout farm", "version": version("rollout-farm")},
        "security": [{"key": []}],
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


_PROBLEM = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {name: {"type": "string"} for name in ("kind", "message", "field")},
        }
    },
}


def _operation(path: str, described: EndpointDescription, schemas: dict[str, Any]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    if described.query is not None:
        result = _model(described.query, schemas)
        for name, schema in result.get("properties", {}).items():
            parameters.append(
                {"name": name, "in": "query", "required": name in result.get("required", ()), "schema": schema}
            )
    answer = {
        "description": "Done.",
        "content": {described.media_type: {"schema": _schema(described.returns, schemas)}},
    }
    refused = {"description": "Refused.", "content": {JSON: {"schema": {"$ref": f"{_REF}Problem"}}}}
    operation: dict[str, Any] = {"summary": described.summary, "responses": {"200": answer, "default": refused}}
    if parameters:
        operation["parameters"] = parameters
    if described.body is not None:
        body = {"content": {JSON: {"schema": _schema(described.body, schemas)}}, "required": True}
        operation["requestBody"] = body
    return operation


def _schema(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type as serialized; types with fields are put into `schemas`."""
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
    if origin in (list, tuple):
        return {"type": "array", "items": _schema(parts[0], schemas)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(parts[1], schemas)}
    if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, BaseModel)):
        if kind.__name__ not in schemas:
            # noted first, as a type may hold itself
            schemas[kind.__name__] = {}
            schemas[kind.__name__] = _model(kind, schemas) if issubclass(kind, BaseModel) else _record(kind, schemas)
        return {"$ref": f"{_REF}{kind.__name__}"}
    return {"type": "string", "format": "binary"} if kind is bytes else {}


def _record(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    types = get_type_hints(kind)
    properties = {each.name: _schema(types[each.name], schemas) for each in fields(kind)}
    return {"type": "object", "description": kind.__doc__ or "", "properties": properties, "required": list(properties)}


def _model(kind: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    schema = kind.model_json_schema(ref_template=f"{_REF}{{model}}")
    schemas.update(schema.pop("$defs", {}))
    return schema
