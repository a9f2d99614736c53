"""Requests generated from the API's own description: valid ones, and invalid ones."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Schema = dict[str, Any]
_TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
_NAMES = st.sampled_from(["noop", "math", "", "a", "admin", "http://127.0.0.1:9/v1", "env:HOME", "none"])
_LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | _TEXTS | _NAMES
ANYTHING = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3), max_leaves=6
)
_BOUND = 2**40


def matching_values(schema: Schema, components: Schema, depth: int = 0) -> st.SearchStrategy[Any]:
    """Return values that match a schema, or nearly so."""
    if "$ref" in schema:
        return matching_values(components[schema["$ref"].rpartition("/")[2]], components, depth + 1)
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return st.one_of([matching_values(each, components, depth + 1) for each in schema[word]])
    kind = schema.get("type")
    if kind == "string":
        return _string(schema)
    if kind == "integer":
        least = schema.get("minimum", -_BOUND)
        return st.integers(least, max(least, schema.get("maximum", _BOUND)))
    if kind == "number":
        return st.floats(schema.get("minimum"), schema.get("maximum"), allow_nan=False, allow_infinity=False)
    if kind == "boolean":
        return st.booleans()
    if kind == "null":
        return st.none()
    if kind == "array" and depth < 8:
        return st.lists(matching_values(schema.get("items", {}), components, depth + 1), max_size=3)
    if kind == "object" and depth < 8:
        return _object(schema, components, depth)
    return ANYTHING


def _string(schema: Schema) -> st.SearchStrategy[str]:
    if "pattern" in schema:
        pattern: str = schema["pattern"]
        return st.from_regex(pattern)
    longest = min(schema.get("maxLength", 20), 20)
    return _NAMES | st.text(max_size=longest, min_size=min(schema.get("minLength", 0), longest))


def _object(schema: Schema, components: Schema, depth: int) -> st.SearchStrategy[Any]:
    fields = {name: matching_values(each, components, depth + 1) for name, each in schema.get("properties", {}).items()}
    if not fields:
        more = schema.get("additionalProperties", {})
        values = matching_values(more, components, depth + 1) if isinstance(more, dict) else ANYTHING
        return st.dictionaries(_TEXTS | _NAMES, values, max_size=3)
    needed = {name: fields[name] for name in schema.get("required", ()) if name in fields}
    return st.fixed_dictionaries(needed, optional={name: fields[name] for name in fields if name not in needed})
