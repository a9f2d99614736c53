"""Handlers with tools, and engines whose models write calls in no format that is read."""

from __future__ import annotations

from typing import Any

import pytest

from farm.client.request_checks import check_tool_formats
from farm.errors import InvalidRequest
from farm.records.engine import EngineInfo
from farm.records.engine_state import StoredEngine
from farm.records.request import BatchRequest

WITH_TOOLS = {"data_source": "swe", "fields": {}}
WITHOUT = {"data_source": "noop", "fields": {}}


def engine(tool_format: str | None, setting: str = "") -> StoredEngine:
    info = None if tool_format is None else EngineInfo(model="glm-9", tool_format=tool_format)
    return StoredEngine("http://e/v1", tool_format=setting, info=info)


def check(engines: list[StoredEngine], *instances: dict[str, Any], **more: Any) -> None:
    check_tool_formats(BatchRequest.model_validate({"instances": instances, **more}), lambda: engines)


@pytest.mark.parametrize("engines", [[engine("none")], [engine("none"), engine("none")]])
def test_tools_are_refused_where_no_models_calls_can_be_read(engines: list[StoredEngine]) -> None:
    with pytest.raises(InvalidRequest, match=r"instances\[1\].data_source: .*glm-9 has no tool call format"):
        check(engines, WITHOUT, WITH_TOOLS)


@pytest.mark.parametrize(
    "engines",
    [[], [engine(None)], [engine("")], [engine("hermes")], [engine("none"), engine("glm")], [engine("none", "none")]],
    ids=["no engine", "not probed", "read by the engine", "known", "one of two", "set to none"],
)
def test_tools_are_taken_where_calls_may_be_read(engines: list[StoredEngine]) -> None:
    check(engines, WITHOUT, WITH_TOOLS)


def test_what_asks_for_no_tools_of_the_farms_engines_is_taken() -> None:
    check([engine("none")], WITHOUT)
    check([engine("none")], WITH_TOOLS, engine_url="http://other/v1")
    check([engine("none")], {**WITH_TOOLS, "engine_url": "http://other/v1"})
