"""`farm agents check` on correct and on broken programs, in a real sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from click.testing import CliRunner

from tests.services.entry_points import installed
from workers.cli.agent_check import main

ASKING = """
import json, os, subprocess, sys, urllib.request
tool = {"type": "function", "function": {"name": "bash", "parameters": {
    "type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}}}
messages = [{"role": "user", "content": sys.argv[1]}]
def ask():
    body = json.dumps({"model": "policy", "messages": messages, "tools": [tool]}).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    answer = urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60)
    messages.append(json.load(answer)["choices"][0]["message"])
    return messages[-1]
while calls := ask().get("tool_calls"):
    for call in calls:
        command = json.loads(call["function"]["arguments"])["command"]
        said = subprocess.run(["bash", "-c", command], capture_output=True, text=True).stdout
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
print(messages[-1]["content"])
"""
PROGRAMS = {
    "asking": ASKING,
    "silent": "print('I know it already')",
    "crashing": "import sys; print('about to crash'); sys.exit('no such thing')",
}
MODULE = """
from workers.agents.harness import Harness, HarnessAgent

PROGRAMS = {programs!r}


def agent(name):
    command = lambda task: ["python3", "-c", PROGRAMS[name], task.text]
    return HarnessAgent(Harness(name=name, command=command))


def asking():
    return agent("asking")


def silent():
    return agent("silent")


def crashing():
    return agent("crashing")
"""
PROJECT = """
[project]
name = "checked-agents"
version = "1.0"

[project.entry-points."farm.agents"]
asking = "checked_agents:asking"
silent = "checked_agents:silent"
crashing = "checked_agents:crashing"
broken = "checked_agents:not_there"
"""


@pytest.fixture(autouse=True)
def agents(tmp_path: Path) -> Iterator[None]:
    project = tmp_path / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(dedent(PROJECT))
    (project / "checked_agents.py").write_text(MODULE.format(programs=PROGRAMS))
    with installed(project, tmp_path / "site"):
        yield


def checked(*arguments: str) -> tuple[int, str]:
    ran = CliRunner().invoke(main, ["check", *arguments, "--sandbox", "namespace"], env={"COLUMNS": "200"})
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    return ran.exit_code, ran.output


def test_working_program_is_shown_with_its_calls() -> None:
    code, output = checked("asking")
    assert code == 0, output
    assert "its tool bash ran a command" in output
    assert "asking: answered; 2 calls, 1 training row" in output


def test_policy_answers_with_the_turns_of_a_file(tmp_path: Path) -> None:
    turns = [{"tool_calls": [{"name": "bash", "arguments": {"command": f"echo {number}"}}]} for number in range(3)]
    (tmp_path / "turns.jsonl").write_text("\n".join(map(json.dumps, [*turns, {"content": "done"}])))
    code, output = checked("asking", "--turns", str(tmp_path / "turns.jsonl"))
    assert code == 0, output
    assert "asking: answered; 4 calls, 1 training row" in output


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("silent", ["silent: AgentError", "without any answer of its model"]),
        ("crashing", ["crashing: AgentError", "stdout.txt: about to crash", "stderr.txt: no such thing"]),
        ("broken", ["not_there"]),
        ("nothing", ["no agent is named 'nothing'", "installed here are: ", "asking"]),
    ],
)
def test_failure_is_reported_with_the_output_of_the_program(name: str, words: list[str]) -> None:
    code, output = checked(name)
    assert code == 1
    assert [word for word in words if word not in output] == [], output
    assert "Traceback" not in output


def test_unreadable_turns_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "turns.jsonl").write_text('{"said": "x"}')
    code, output = checked("asking", "--turns", str(tmp_path / "turns.jsonl"))
    assert code == 1
    assert "turns.jsonl: " in output


def test_list_contains_all_installed_agents() -> None:
    output = CliRunner().invoke(main, ["list"]).output
    assert {"asking", "claude-code", "react"} <= {line.split()[0] for line in output.splitlines() if line.strip()}
