"""The shell calls of an ordered script: by any shell tool, with the arguments of its schema."""

from __future__ import annotations

from typing import Any

import pytest

from workers.testing.scripted_model import (
    DONE,
    GIVE_UP,
    OrderedScript,
    ScriptedTurn,
    ShellScript,
    last_call,
    shell_call,
)

TEXT: dict[str, Any] = {"type": "string"}


def tool(name: str, properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"name": name, "parameters": {"type": "object", "properties": properties, "required": list(required)}}


@pytest.mark.parametrize(
    ("tools", "arguments"),
    [
        ([tool("bash", {"command": TEXT}, "command")], {"command": "ls"}),
        ([tool("read", {"path": TEXT}), tool("exec_command", {"cmd": TEXT}, "cmd")], {"cmd": "ls"}),
        ([tool("shell", {"command": {"type": "array"}}, "command")], {"command": ["bash", "-c", "ls"]}),
        (
            [tool("Bash", {"command": TEXT, "wait": {"type": "boolean"}, "why": TEXT}, "command", "wait", "why")],
            {"command": "ls", "wait": False, "why": "a command"},
        ),
        ([tool("run", {"command": TEXT, "risk": {"enum": ["low", "high"]}}, "risk")], {"command": "ls", "risk": "low"}),
        ([tool("read", {"path": TEXT}, "path")], None),
        ([tool("bash", {"path": TEXT})], None),
        ([{"name": "bash"}], None),
        ([], None),
    ],
)
def test_command_is_called_with_the_arguments_of_the_tool(
    tools: list[dict[str, Any]], arguments: dict[str, Any] | None
) -> None:
    call = shell_call(tools, "ls")
    assert (None if call is None else call.arguments) == arguments


def test_turns_are_in_order_whatever_the_history_contains() -> None:
    turns = [ScriptedTurn(content=text) for text in "ab"]
    script = OrderedScript(turns, "task")
    task = {"role": "user", "content": "the task"}
    example = {"role": "assistant", "content": "an example"}
    answer = {"role": "assistant", "content": "rewritten"}
    assert script.next_turn([example, task], None) == turns[0]
    assert script.next_turn([example, task, answer], None) == turns[1]
    assert script.next_turn([example, task, answer, answer], None) == DONE
    assert script.next_turn([{"role": "user", "content": "a title"}], None) == GIVE_UP


def test_answer_is_the_first_turn_without_a_shell_tool() -> None:
    script = ShellScript("ls", "done", "task")
    assert script.next_turn([{"role": "user", "content": "task"}], None) == ScriptedTurn(content="done")
    assert script.tool == ""


@pytest.mark.parametrize(
    ("tools", "arguments"),
    [
        (
            [tool("bash", {"command": TEXT}, "command"), tool("final_answer", {"answer": TEXT}, "answer")],
            {"answer": "done"},
        ),
        ([tool("submit", {})], {}),
        ([tool("bash", {"command": TEXT}, "command")], None),
    ],
)
def test_tool_that_ends_the_rollout_is_called_last(
    tools: list[dict[str, Any]], arguments: dict[str, Any] | None
) -> None:
    call = last_call(tools, "done")
    assert (None if call is None else call.arguments) == arguments
