"""The examples of "Your own program" and "Agents", as on the pages, in a folder of this machine."""

from __future__ import annotations

import asyncio
import shutil
import sys
from dataclasses import replace
from typing import Any

import pytest

from farm.records.rollout import Outcome
from tests.unit.test_docs import code_with
from tests.unit.workers.agents.test_harness import _Records, context_of, run_harness
from workers.agents.harness import Harness
from workers.plugins.interfaces import AgentResult
from workers.testing import ScriptedPolicy, answering


def shown(name: str) -> Harness:
    """The example of this name, with its files in the working folder: a local sandbox has no other."""
    names: dict[str, Any] = {"__file__": "/somewhere/my_package.py"}
    exec(code_with("how-to/plugins/agents/your_program.md", name).replace("/tmp/farm-agent/", ""), names)
    harness: Harness = names[name]
    assert names[harness.name.replace("-", "_")]().sandbox(None).agent_packages == harness.packages
    return harness


def on_this_machine(harness: Harness, program: str) -> AgentResult:
    here = replace(harness, packages=(), programs=(), command=lambda task: [program, *harness.command(task)[1:]])
    return run_harness(here, answering("Lima"))


def test_example_in_python_runs() -> None:
    # its client is already installed here
    assert on_this_machine(shown("PYTHON_AGENT"), sys.executable) == AgentResult(Outcome.ANSWERED, "Lima")


def test_example_in_node_runs() -> None:
    harness = shown("NODE_AGENT")
    assert [each.kind for each in harness.programs] == ["npm"]
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no Node on this machine")
    assert on_this_machine(harness, node) == AgentResult(Outcome.ANSWERED, "Lima")


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, AgentResult(Outcome.ANSWERED, "Lima")),
        ({"max_turns": 1}, AgentResult(Outcome.MAX_TURNS)),
        ({"max_tokens": 1}, AgentResult(Outcome.MAX_TOKENS)),
    ],
)
def test_example_without_a_sandbox_runs(limits: dict[str, int], expected: AgentResult) -> None:
    names: dict[str, Any] = {}
    exec(code_with("how-to/plugins/agents.md", "class SecondLook"), names)
    policy, records = ScriptedPolicy(answering("Cusco"), answering("Lima")), _Records()
    assert asyncio.run(names["SecondLook"]().run(context_of(None, policy, records, **limits))) == expected
    first, *others = records.calls
    assert [message["role"] for message in first.messages] == ["system", "user"]
    assert [[message["role"] for message in call.messages] for call in others] == [["user"]] * (limits == {})
