"""Each preset, unmodified, fixes a real project in a sandbox without a network; its calls and rows are the page's."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from farm.errors import SandboxError
from tests.agents.issue_rollout import FIX, SWE, run_rollout
from tests.conftest import absent
from workers.plugins.registry import sandbox as provider
from workers.sandboxes.images.environments import interpreter_for
from workers.testing.scripted_model import ScriptedCall, ScriptedTurn

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "plugins" / "agents" / "presets.md"
LIST_FILES = "git status --short; ls"


def by_tool(
    name: str, argument: str = "command", last: ScriptedTurn | None = None, **more: object
) -> list[ScriptedTurn]:
    """Find and fix the bug by commands, then report it."""
    turns = [
        ScriptedTurn(content=content, tool_calls=(ScriptedCall(name=name, arguments={argument: command, **more}),))
        for content, command in (("I look.", LIST_FILES), ("I see the fault.", FIX))
    ]
    return [*turns, last or ScriptedTurn(content="I have fixed it.")]


def submission(name: str, **arguments: object) -> ScriptedTurn:
    return ScriptedTurn(content="I have fixed it.", tool_calls=(ScriptedCall(name=name, arguments=dict(arguments)),))


def typed(commands: Sequence[str]) -> list[ScriptedTurn]:
    answers = [{"plan": "go on", "commands": [{"keystrokes": f"{each}\n", "duration": 10}]} for each in commands]
    return [ScriptedTurn(content=json.dumps(each)) for each in (*answers, {"commands": [], "task_complete": True})]


def as_text() -> list[ScriptedTurn]:
    diff = "\n".join(line for line in str(SWE.patch).splitlines() if not line.startswith("diff "))
    first = ScriptedTurn(content="I need to see sqlparse/sql.py.")
    return [first, ScriptedTurn(content=f"This fixes it:\n\n```diff\n{diff}\n```\n")]


TURNS: dict[str, Callable[[], list[ScriptedTurn]]] = {
    "claude-code": lambda: by_tool("Bash"),
    "codex": lambda: by_tool("exec_command", "cmd"),
    "opencode": lambda: by_tool("bash", description="a command"),
    "qwen-code": lambda: by_tool("run_shell_command", is_background=False),
    "gemini-cli": lambda: by_tool("run_shell_command"),
    "mini-swe-agent": lambda: by_tool(
        "bash", last=submission("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo done")
    ),
    "openhands": lambda: by_tool("terminal", last=submission("finish", message="fixed")),
    "smolagents": lambda: by_tool("bash", last=submission("final_answer", answer="fixed")),
    "openai-agents": lambda: by_tool("bash"),
    "pydantic-ai": lambda: by_tool("bash"),
    "langgraph": lambda: by_tool("bash"),
    "aider": as_text,
    "terminal": lambda: typed([LIST_FILES, FIX]),
}


def page_rows() -> dict[str, list[str]]:
    """The rows of the page's table, by preset."""
    lines = [line.strip("| \n").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {cells[0].strip("`"): cells for cells in lines}


@pytest.mark.parametrize("kind", ["namespace", "singularity"])
@pytest.mark.parametrize("preset", TURNS)
def test_preset_fixes_an_issue(preset: str, kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "singularity":
        request.getfixturevalue("apptainer")
    if missing := provider(kind).missing():
        absent(missing)
    if preset == "openhands":
        try:
            interpreter_for("3.12")
        except SandboxError as error:
            absent(str(error))
    trial = run_rollout(preset, kind, TURNS[preset]())
    assert trial.reward == 1.0, trial
    *_, n_calls, n_rows, why = page_rows()[preset]
    assert [str(len(trial.calls)), str(len(trial.rows))] == [n_calls, n_rows], trial.breaks
    assert (why == "none") is (len(trial.rows) == 1), trial.breaks
    without_tools = [call for call in trial.calls if call.labels["tools"] == "0"]
    assert len(without_tools) == {"opencode": 1, "aider": 2, "terminal": 3}.get(preset, 0)
    assert [call.mismatch for call in trial.calls] == [None] * len(trial.calls)
