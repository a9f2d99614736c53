"""Data sources of ProRL on handlers of the farm: by the names that its registry has, their aliases, and `stem…`."""

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
_NOT_PLAYED = {
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
"""Data sources that have no handler here, each with its missing requirement."""
_OF_THE_WIRE = ("data_source", "trajectory_id", "instance_id")


def handler_of(data_source: str) -> str:
    """Return the farm's handler for a data source. Raises UnknownHandler, naming those that are played."""
    if data_source in _NOT_PLAYED:
        raise UnknownHandler(f"data_source {data_source!r} needs {_NOT_PLAYED[data_source]}, which is not played here")
    if data_source in _HANDLERS:
        return _HANDLERS[data_source]
    for prefix, handler in _PREFIXES.items():
        if data_source.startswith(prefix):
            return handler
    return known_handler(data_source, {*_HANDLERS, *(f"{prefix}…" for prefix in _PREFIXES)})


def fields_of(instance: Mapping[str, Any], data_source: str) -> dict[str, Any]:
    """Return the fields of a farm's instance: rows as they are, and of the farm's own handlers their own fields."""
    if data_source in _HANDLERS or data_source.startswith(tuple(_PREFIXES)):
        return columns_without(instance, ("data_source", "trajectory_id"))
    return columns_without(instance, _OF_THE_WIRE)
