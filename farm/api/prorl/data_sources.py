"""Handlers for ProRL's data sources: by the names in its registry, their aliases, and `stem…`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from farm.api.protocol_parts.task_rows import columns_without, known_handler
from farm.errors import UnknownHandler

DEFAULT = "swebench"
_HANDLERS = {
    "swebench": "swe-bench",
    "r2egym": "swe-bench",
    "deepscaler": "answer",
    "codecontests": "programs",
    "apps": "programs",
    "codeforces": "programs",
    "taco": "programs",
}
_PREFIXES = {"deepcoder": "programs", "stem": "answer"}
_UNSUPPORTED = {
    "swebench_multimodal": "images in an issue",
    "gui": "a browser",
    "visual_browsing": "a browser",
    "browsergym": "a browser",
    "osworld": "a desktop",
    "near": "search on the web",
    "research": "search on the web",
    "deep_research": "search on the web",
    "prorl": "its own scorers",
    "rStar": "its own scorers",
    "tool_call": "its own scorers",
    "if_eval": "its own scorers",
    "llm_judge": "its own judge",
}
"""Data sources without a handler here, each with its missing requirement."""
_OF_THE_WIRE = ("data_source", "trajectory_id", "instance_id")


def handler_of(data_source: str) -> str:
    """Return the farm's handler for a data source. Raises UnknownHandler, naming the known ones."""
    if data_source in _UNSUPPORTED:
        raise UnknownHandler(f"data_source {data_source!r} needs {_UNSUPPORTED[data_source]}, which the farm lacks")
    if data_source in _HANDLERS:
        return _HANDLERS[data_source]
    for prefix, handler in _PREFIXES.items():
        if data_source.startswith(prefix):
            return handler
    return known_handler(data_source, {*_HANDLERS, *(f"{prefix}…" for prefix in _PREFIXES)})


def fields_of(instance: Mapping[str, Any], data_source: str) -> dict[str, Any]:
    """Return the fields of an instance: the row unchanged, or for the farm's own handlers their fields."""
    if data_source in _HANDLERS or data_source.startswith(tuple(_PREFIXES)):
        return columns_without(instance, ("data_source", "trajectory_id"))
    return columns_without(instance, _OF_THE_WIRE)
