"""A handler whose sandboxes have a mount that hangs, an agent that uses it, and their installation."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from farm.records.request import SandboxLimits, SandboxSpec
from farm.records.rollout import Outcome
from farm.records.trajectory import Message
from tests.services.unruly import ROOT
from workers.plugins.handler import Handler
from workers.plugins.interfaces import (
    NO_MODELS,
    AgentContext,
    AgentResult,
    ChatModel,
    Evaluator,
    FreshSandbox,
    Sandbox,
    Score,
    Submission,
)
from workers.sandboxes.sandbox import NodeSandbox
from workers.testing.plugin_path import python_path

PLACE = "/tmp/silent"
_LARGE = Path("/bin/bash").resolve()
"""More than fits in a pipe."""


def installed_in(folder: Path) -> dict[str, str]:
    """Return the environment of a farm for which these are installed."""
    site = folder / "site"
    (site / "asleep-1.dist-info").mkdir(parents=True)
    (site / "asleep-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: asleep\nVersion: 1\n")
    (site / "asleep-1.dist-info/entry_points.txt").write_text(
        "[farm.handlers]\nasleep = tests.services.silent_mounts:SilentMountHandler\n"
        "[farm.agents]\nasleep = tests.services.silent_mounts:SilentMountAgent\n"
    )
    return {"PYTHONPATH": python_path(site, ROOT)}


class SilentMountInstance(BaseModel):
    """With `servers`, a folder, a mount that hangs is at PLACE, and the folder has a file named by its server's pid.

    `collect` is how the handler accesses it: `read`, `download` or `upload`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    servers: str = ""
    command: str = "true"
    collect: str = ""


class SilentMountHandler(Handler[SilentMountInstance]):
    data_source: ClassVar[str] = "asleep"
    instance_type: ClassVar[type[BaseModel]] = SilentMountInstance
    agent: ClassVar[str] = "asleep"
    tools: ClassVar[Collection[str]] = ("bash",)

    def sandbox(self) -> SandboxSpec | None:
        return SandboxSpec(kind="namespace", limits=SandboxLimits(memory_mb=200, disk_mb=20))

    def messages(self) -> list[Message]:
        return [{"role": "user", "content": self.instance.command}]

    async def prepare(self, sandbox: Sandbox) -> None:
        if not self.instance.servers:
            return
        assert isinstance(sandbox, NodeSandbox)
        await sandbox.exec(["mkdir", PLACE], timeout_s=20)
        argv = ["-m", "tests.services.servers.fuse", str(sandbox._record.first.pid), PLACE, self.instance.servers]
        server = await asyncio.create_subprocess_exec(
            sys.executable, *argv, cwd=ROOT, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        assert server.stdout
        assert await server.stdout.readline() == b"up\n"

    async def collect(self, sandbox: Sandbox | None, answer: str | None) -> Submission:
        assert sandbox is not None
        if self.instance.collect == "read":
            await sandbox.read_file(f"{PLACE}/x")
        elif self.instance.collect == "download":
            await sandbox.download(f"{PLACE}/x", Path(self.instance.servers, "downloaded"))
        elif self.instance.collect == "upload":
            await sandbox.upload(_LARGE, f"{PLACE}/x/y")
        return Submission(answer=answer)

    def evaluator(self, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        return SilentMountEvaluator()


class SilentMountAgent:
    """Runs the command; its answer is the pid of its worker."""

    async def run(self, context: AgentContext) -> AgentResult:
        tool = context.tools["bash"]
        arguments = tool.arguments.model_validate({"command": context.messages[0]["content"]})
        await tool.call(arguments, context.limits.tool_s)
        return AgentResult(Outcome.SUBMITTED, str(os.getpid()))


class SilentMountEvaluator:
    """Returns 1; records the processes of run and scoring."""

    name: ClassVar[str] = "asleep"

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        return Score(1.0, {"workers": [submission.answer, str(os.getpid())]})
