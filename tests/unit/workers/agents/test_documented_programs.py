"""The examples of "Your own program", as the page has them, in a folder of this machine."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from typing import Any

import pytest

from farm.records.rollout import Outcome
from tests.unit.test_docs import code_with
from tests.unit.workers.agents.test_harness import played_by
from workers.agents.harness import Harness
from workers.interfaces import AgentResult
from workers.testing import answering


def shown(name: str) -> Harness:
    """The example of a name, with its files in the working folder: a local sandbox has no other."""
    names: dict[str, Any] = {"__file__": "/somewhere/my_package.py"}
    exec(code_with("agents/your_program.md", name).replace("/tmp/farm-agent/", ""), names)
    harness: Harness = names[name]
    assert names[harness.name.replace("-", "_")]().sandbox(None).agent_packages == harness.packages
    return harness


def on_this_machine(harness: Harness, program: str) -> AgentResult:
    here = replace(harness, packages=(), programs=(), command=lambda task: [program, *harness.command(task)[1:]])
    return played_by(here, answering("Lima"))


def test_the_example_in_python_plays() -> None:
    # its client is installed here already
    assert on_this_machine(shown("PYTHON_AGENT"), sys.executable) == AgentResult(Outcome.ANSWERED, "Lima")


def test_the_example_in_node_plays() -> None:
    harness = shown("NODE_AGENT")
    assert [each.kind for each in harness.programs] == ["npm"]
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no Node on this machine")
    assert on_this_machine(harness, node) == AgentResult(Outcome.ANSWERED, "Lima")
