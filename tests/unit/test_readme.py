"""The README says nothing that is not so: its files exist, its commands too; its handler is one, its agent plays."""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from farm.cli import main
from farm.request import Limits, SamplingParams, SandboxSpec
from farm.rollout import Outcome
from farm.trajectory import ModelCall
from workers.agents.harness import Harness, HarnessAgent
from workers.interfaces import AgentContext, AgentResult, Artefact, Sandbox, Submission
from workers.testing import ScriptedPolicy, answering
from workers.testing.chat import ContainsEvaluator
from workers.testing.local import LocalProvider

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_files_it_names_exist() -> None:
    named = set(re.findall(r"`((?:farm|workers|tests|examples|alembic|docker|benchmarks)/[\w./-]*)`", README))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_commands_it_names_exist() -> None:
    named = set(re.findall(r"(?:^|`|· )farm ([a-z]+)", README, re.MULTILINE))
    assert named >= {"up", "node", "submit", "watch", "show", "collect", "cancel", "doctor", "flower", "migrate"}
    assert named <= set(main.commands)


def test_the_make_targets_it_names_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^|`)make ([a-z]+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def code_with(name: str) -> str:
    blocks: list[str] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return next(block for block in blocks if name in block)


def test_its_agent_plays() -> None:
    names: dict[str, Any] = {"Harness": Harness, "HarnessAgent": HarnessAgent}
    exec(code_with("ONE_QUESTION"), names)
    shown: Harness = names["ONE_QUESTION"]
    assert names["one_question"]().sandbox(None).agent_packages == shown.packages
    # in a folder of this machine, where its client is installed already
    here = replace(shown, packages=(), command=lambda task: [sys.executable, *shown.command(task)[1:]])

    async def main() -> AgentResult:
        sandbox = await LocalProvider().start("readme", SandboxSpec())
        try:
            agent = HarnessAgent(here, inside=str(sandbox.socket_folder))
            return await agent.run(context_of(sandbox))
        finally:
            await sandbox.stop()

    assert asyncio.run(main()) == AgentResult(Outcome.ANSWERED, "Lima")


def context_of(sandbox: Sandbox) -> AgentContext:
    async def record(call: ModelCall) -> None: ...
    async def keep(index: int, artefact: Artefact) -> str:
        return artefact.name

    return AgentContext(
        rollout_id="readme",
        messages=[{"role": "user", "content": "What is the capital of Peru?"}],
        tools={},
        policy=ScriptedPolicy(answering("Lima")),
        sampling=SamplingParams(),
        limits=Limits(),
        record=record,
        keep=keep,
        sandbox=sandbox,
    )


def test_its_handler_is_one() -> None:
    code = code_with("CapitalHandler")
    names: dict[str, Any] = {
        "BaseModel": BaseModel,
        "ConfigDict": ConfigDict,
        "Submission": Submission,
        "ContainsEvaluator": ContainsEvaluator,
    }
    exec(code, names)
    handler = names["CapitalHandler"]()
    instance = handler.instance_type.model_validate({"country": "Peru", "capital": "Lima"})
    assert handler.messages(instance) == [{"role": "user", "content": "What is the capital of Peru?"}]
    assert handler.sandbox(instance) is None
    assert handler.evaluator(instance).name == "contains"
