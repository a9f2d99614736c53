"""A handler, an agent and an evaluator that misbehave as their instance asks, and how to install them in a farm."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from farm.errors import SandboxError
from farm.request import SandboxLimits, SandboxSpec
from farm.rollout import Outcome
from farm.trajectory import Message
from workers.interfaces import AgentContext, AgentResult, Evaluator, FreshSandbox, Sandbox, Score, Submission
from workers.sandboxes.joined import JoinedSandbox

ROOT = Path(__file__).parents[2]
SPEC = SandboxSpec(limits=SandboxLimits(memory_mb=200, disk_mb=20))
SPECS = {
    "host": SPEC,
    "unstartable": SPEC.model_copy(update={"workdir": "relative"}),
    "imageless": SPEC.model_copy(update={"image": "/there/is/none"}),
}


def installed_in(folder: Path) -> dict[str, str]:
    """The environment of a farm for which these are installed."""
    site = folder / "site"
    (site / "unruly-1.dist-info").mkdir(parents=True)
    (site / "unruly-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: unruly\nVersion: 1\n")
    (site / "unruly-1.dist-info/entry_points.txt").write_text(
        "[farm.handlers]\n"
        "unruly = tests.services.unruly:UnrulyHandler\n"
        "working = tests.services.unruly:WorkingHandler\n"
        "[farm.agents]\n"
        "unruly = tests.services.unruly:UnrulyAgent\n"
    )
    return {"PYTHONPATH": f"{site}:{ROOT}"}


class UnrulyInstance(BaseModel):
    """`fault` is what breaks, such as `collect:raise`; `where` names one of SPECS, or nothing.

    With `nodes`, the fault strikes on these nodes alone; with `times`, so many times in all: each strike leaves a file
    in the folder `marks`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    fault: str = ""
    where: str = ""
    nodes: tuple[str, ...] = ()
    times: int = 0
    marks: str = ""
    seconds: float = Field(default=0.0, ge=0)

    def strikes(self, fault: str) -> bool:
        if self.fault != fault or (self.nodes and os.environ["FARM_NODE"] not in self.nodes):
            return False
        if not self.times:
            return True
        struck = len(list(Path(self.marks).iterdir()))
        if struck >= self.times:
            return False
        Path(self.marks, f"{struck}").touch()
        return True

    def raise_in(self, place: str) -> None:
        if self.strikes(f"{place}:raise"):
            raise RuntimeError(f"the instance asks for it in {place}")


class UnrulyHandler:
    """Fails in each of its methods, and hangs in one."""

    data_source: ClassVar[str] = "unruly"
    instance_type: ClassVar[type[BaseModel]] = UnrulyInstance
    agent: ClassVar[str] = "unruly"
    tools: ClassVar[Collection[str]] = ()

    def sandbox(self, instance: UnrulyInstance) -> SandboxSpec | None:
        instance.raise_in("sandbox")
        if instance.strikes("node:sick"):
            raise SandboxError("no space is left on this node")
        return SPECS.get(instance.where)

    def messages(self, instance: UnrulyInstance) -> list[Message]:
        instance.raise_in("messages")
        return [{"role": "user", "content": instance.model_dump_json()}]

    async def prepare(self, instance: UnrulyInstance, sandbox: Sandbox) -> None:
        instance.raise_in("prepare")
        if instance.fault == "prepare:hang":
            await asyncio.Event().wait()

    async def collect(self, instance: UnrulyInstance, sandbox: Sandbox | None, answer: str | None) -> Submission:
        instance.raise_in("collect")
        if instance.fault == "collect:hang":
            await asyncio.Event().wait()
        if sandbox is not None:
            await sandbox.exec(["true"], timeout_s=5.0)
        return Submission(answer=answer)

    def evaluator(self, instance: UnrulyInstance) -> Evaluator:
        return UnrulyEvaluator(instance)


_SCORES: dict[str, Any] = {
    "evaluate:nan": math.nan,
    "evaluate:infinite": math.inf,
    "evaluate:text": "1.0",
    "evaluate:none": None,
    "evaluate:complex": 1j,
}


class UnrulyEvaluator:
    """Gives 1, or what is no score."""

    name: ClassVar[str] = "unruly"

    def __init__(self, instance: UnrulyInstance) -> None:
        self._instance = instance

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        self._instance.raise_in("evaluate")
        if self._instance.fault == "evaluate:hang":
            await asyncio.Event().wait()
        if self._instance.fault == "evaluate:hang and break":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise RuntimeError("it was disturbed") from None
        if self._instance.fault == "evaluate:unwritable":
            return Score(1.0, {"what": object()})
        return Score(_SCORES.get(self._instance.fault, 1.0))


class UnrulyAgent:
    """Ends as it should, or as the instance asks."""

    async def run(self, context: AgentContext) -> AgentResult:
        instance = UnrulyInstance.model_validate_json(str(context.messages[0]["content"]))
        fault = instance.fault
        instance.raise_in("agent")
        if fault == "agent:cancelled":
            raise asyncio.CancelledError
        if fault == "agent:stubborn":
            await _swallow_cancellations(3)
        if fault == "agent:outcome":
            return AgentResult(Outcome.LOST, "1")
        if fault == "agent:none":
            return None  # type: ignore[return-value]
        if instance.strikes("agent:die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault in {"sandbox:killed", "sandbox:killed late"}:
            assert isinstance(context.sandbox, JoinedSandbox)
            # its init: the kernel kills the rest
            os.kill(context.sandbox._record.first.pid, signal.SIGKILL)
        if fault == "sandbox:killed":
            assert context.sandbox is not None
            await context.sandbox.exec(["true"], timeout_s=5.0)
        await asyncio.sleep(instance.seconds)
        return AgentResult(Outcome.SUBMITTED, "1")


async def _swallow_cancellations(n: int) -> None:
    for _ in range(n):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


class WorkingInstance(BaseModel):
    """`question` picks a play of the scripted engine's book."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    question: str


class WorkingHandler:
    """A policy with a shell in a small sandbox; whatever it submits is worth 1."""

    data_source: ClassVar[str] = "working"
    instance_type: ClassVar[type[BaseModel]] = WorkingInstance
    agent: ClassVar[str] = "react"
    tools: ClassVar[Collection[str]] = ("bash", "submit")

    def sandbox(self, instance: WorkingInstance) -> SandboxSpec | None:
        return SPEC

    def messages(self, instance: WorkingInstance) -> list[Message]:
        return [{"role": "user", "content": instance.question}]

    async def prepare(self, instance: WorkingInstance, sandbox: Sandbox) -> None:
        """Nothing to stage."""

    async def collect(self, instance: WorkingInstance, sandbox: Sandbox | None, answer: str | None) -> Submission:
        assert sandbox is not None
        await sandbox.exec(["true"], timeout_s=5.0)
        return Submission(answer=answer)

    def evaluator(self, instance: WorkingInstance) -> Evaluator:
        return UnrulyEvaluator(UnrulyInstance())
