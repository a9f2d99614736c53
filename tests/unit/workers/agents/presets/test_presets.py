"""The definitions of the presets: their packages, their commands, and their input."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farm.plugins import load
from farm.records.request import Limits
from workers.agents import mini_swe_agent
from workers.agents.harness import Harness, HarnessAgent, Task
from workers.agents.presets import node_presets, python_presets
from workers.agents.presets.preset_parts import STATE, pinned
from workers.sandboxes.agent_programs.brought_programs import checked_lock

PRESETS: dict[str, Harness] = {
    each.name: each
    for module in (mini_swe_agent, node_presets, python_presets)
    for each in vars(module).values()
    if isinstance(each, Harness)
}
HARD = '--help\n\'; $(rm -rf /) "{base_url}" \\n ü'
TASK = Task(HARD, Limits(max_turns=7, tool_s=30), "http://farm-gateway-0123", "sk-1", "policy")

each_preset = pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS.keys())


def environment(preset: Harness) -> dict[str, str]:
    return dict(preset.environment(TASK) if callable(preset.environment) else preset.environment)


@each_preset
def test_preset_is_a_plug_in_of_its_name(preset: Harness) -> None:
    agent = load("farm.agents", preset.name)()
    assert isinstance(agent, HarnessAgent)
    spec = agent.sandbox(None)
    assert (spec.agent_packages, spec.agent_programs) == (preset.packages, preset.programs)


@each_preset
def test_any_task_is_passed_completely_and_never_as_an_argument(preset: Harness) -> None:
    assert not any(HARD in word for word in preset.command(TASK)), (
        "an argument has a length limit, and may look like an option"
    )
    inputs = [preset.stdin(TASK), *preset.files(TASK).values()]
    assert any(HARD in each or json.dumps(HARD)[1:-1] in each for each in inputs)


@each_preset
def test_all_files_are_outside_the_working_folder(preset: Harness) -> None:
    assert all(path.startswith(f"{STATE}/") for path in preset.files(TASK))


@pytest.mark.parametrize(
    "path", sorted(Path(node_presets.__file__).parent.glob("locks/*.json")), ids=lambda path: path.name
)
def test_lock_of_npm_packages_is_complete(path: Path) -> None:
    lock = checked_lock(path, path.read_text())
    names = {place.rpartition("node_modules/")[2] for place in lock["packages"]}
    wanted = {name for each in lock["packages"].values() for name in each.get("optionalDependencies", ())}
    assert wanted <= names, "npm refuses a lock that names what it does not list"
    assert not any("resolved" in each for each in lock["packages"].values()), "each node has its own registry"


@pytest.mark.parametrize(
    "path", sorted(Path(node_presets.__file__).parent.glob("locks/*.txt")), ids=lambda path: path.name
)
def test_lock_of_python_packages_is_exact(path: Path) -> None:
    lines = path.read_text().split()
    names = [line.partition("==")[0].lower().replace("_", "-") for line in lines]
    assert len(set(names)) == len(names) > 20
    assert all("==" in line for line in lines)


@each_preset
def test_python_packages_are_those_of_the_lock(preset: Harness) -> None:
    assert preset.packages == (pinned(preset.name) if preset.packages else ())


def codex(files: dict[str, str]) -> Any:
    return tomllib.loads(files[f"{STATE}/config.toml"])["model_providers"]["farm"]["base_url"]


def opencode(files: dict[str, str]) -> Any:
    return json.loads(files[f"{STATE}/opencode.json"])["provider"]["farm"]["options"]["baseURL"]


@pytest.mark.parametrize(("name", "url"), [("codex", codex), ("opencode", opencode)])
def test_configuration_has_the_gateways_address(name: str, url: Callable[[dict[str, str]], Any]) -> None:
    assert url(dict(PRESETS[name].files(TASK))) == "http://farm-gateway-0123/v1"


@pytest.mark.parametrize(
    "name", ["claude-code", "openai-agents", "pydantic-ai", "langgraph", "smolagents", "openhands"]
)
def test_turn_limit_of_the_agent_is_that_of_the_rollout(name: str) -> None:
    preset = PRESETS[name]
    words = preset.command(TASK)
    assert (
        environment(preset).get("MAX_TURNS", words[words.index("--max-turns") + 1] if "--max-turns" in words else "")
        == "7"
    )
