"""Promises of tools without a sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from farm.errors import ToolError
from farm.plugins import installed
from farm.settings import Settings
from workers.plugins import registry
from workers.plugins.interfaces import Observation, Sandbox, Tool
from workers.tools.bash import BashTool
from workers.tools.edit import EditTool
from workers.tools.python import PythonTool
from workers.tools.search import SearchTool
from workers.tools.submit import SubmitTool
from workers.tools.think import ThinkTool


def search(sandbox: Sandbox | None) -> SearchTool:
    return SearchTool(sandbox, Settings(search="searxng:http://127.0.0.1:9"))


TOOLS: list[Callable[[Sandbox | None], Tool]] = [BashTool, EditTool, PythonTool, search, SubmitTool, ThinkTool]


@pytest.mark.parametrize(
    ("make", "arguments"),
    [(BashTool, {"command": "ls"}), (PythonTool, {"code": "1"}), (EditTool, {"command": "view", "path": "/"})],
)
def test_tool_without_its_sandbox_is_reported_to_the_model(
    make: Callable[[Sandbox | None], Tool], arguments: dict[str, Any]
) -> None:
    tool = make(None)
    with pytest.raises(ToolError, match=f"`{tool.name}` cannot be used here"):
        asyncio.run(tool.call(tool.arguments(**arguments), 1))
    asyncio.run(tool.close())


def test_submit_ends_the_rollout() -> None:
    tool: Tool = SubmitTool(None)
    submitted = asyncio.run(tool.call(tool.arguments(answer="42"), 1))
    assert submitted == Observation("Submitted.", done=True, answer="42")
    assert asyncio.run(tool.call(tool.arguments(), 1)).answer is None
    asyncio.run(tool.close())


def test_think_only_confirms_the_thought() -> None:
    tool: Tool = ThinkTool(None)
    assert asyncio.run(tool.call(tool.arguments(thought="x" * 10_000), 1)) == Observation(
        "Your thought has been logged."
    )
    asyncio.run(tool.close())


def test_every_tool_is_found_by_its_name() -> None:
    for make in TOOLS:
        name = make(None).name
        assert registry.tool(name).name == name  # type: ignore[attr-defined]
    assert {make(None).name for make in TOOLS} <= set(installed(registry.TOOLS))


@pytest.mark.parametrize("make", TOOLS)
def test_every_argument_is_described(make: Callable[[Sandbox | None], Tool]) -> None:
    tool = make(None)
    assert tool.description
    for name, schema in tool.arguments.model_json_schema()["properties"].items():
        assert schema.get("description"), f"{tool.name}.{name}"
