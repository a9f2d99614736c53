"""Handlers with tools on engines whose models use an unsupported format of tool calls."""

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
def test_tools_are_refused_if_no_model_has_readable_calls(engines: list[StoredEngine]) -> None:
    with pytest.raises(InvalidRequest, match=r"instances\[1\].data_source: .*glm-9 has no tool call format"):
        check(engines, WITHOUT, WITH_TOOLS)


@pytest.mark.parametrize(
    "engines",
    [[], [engine(None)], [engine("")], [engine("hermes")], [engine("none"), engine("glm")], [engine("none", "none")]],
    ids=["no engine", "not probed", "read by the engine", "known", "one of two", "set to none"],
)
def test_tools_are_accepted_if_calls_may_be_readable(engines: list[StoredEngine]) -> None:
    check(engines, WITHOUT, WITH_TOOLS)


def test_requests_that_use_no_tools_of_the_engines_are_accepted() -> None:
    check([engine("none")], WITHOUT)
    check([engine("none")], WITH_TOOLS, engine_url="http://other/v1")
    check([engine("none")], {**WITH_TOOLS, "engine_url": "http://other/v1"})
