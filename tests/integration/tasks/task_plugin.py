"""A handler of tasks with the features of other formats: layers, services, steps, archives, secrets; and an agent that
runs their commands.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from farm import plugins
from farm.errors import HandlerError
from farm.records.request import SandboxLimits, SandboxSpec, TaskTimes
from farm.records.rollout import Outcome
from farm.records.task_needs import TaskNeeds
from farm.records.trajectory import Message
from farm.records.variable_expansion import expanded
from workers.plugins.handler import Handler, NextTurn
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
from workers.testing.plugin_path import python_path

ROOT = Path(__file__).parents[3]


def installed_in(folder: Path) -> dict[str, str]:
    """Return the environment of a farm for which these are installed."""
    site = folder / "site"
    described = site / "task_plugin-1.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: task_plugin\nVersion: 1\n")
    names = {"plain": "TaskHandler", "left": "LeftHandler", "service": "ServiceHandler", "stepped": "SteppedHandler"}
    names["imaged"] = "ImagedHandler"
    handlers = "".join(f"{name} = tests.integration.tasks.task_plugin:{kind}\n" for name, kind in names.items())
    agent = "commands = tests.integration.tasks.task_plugin:CommandAgent\n"
    (described / "entry_points.txt").write_text(f"[farm.handlers]\n{handlers}[farm.agents]\n{agent}")
    return {"PYTHONPATH": python_path(site, ROOT)}


@contextmanager
def known_here(folder: Path) -> Iterator[None]:
    """Make the plug-ins of a folder known to this process, too."""
    sys.path.insert(0, str(folder / "site"))
    plugins.find_installed()
    try:
        yield
    finally:
        sys.path.remove(str(folder / "site"))
        plugins.find_installed()


class TaskInstance(BaseModel):
    """`commands` are the policy's, one per step; `check` is the evaluator's. With `kill`, the first process that scores
    leaves that file and kills itself.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    commands: tuple[str, ...]
    check: str = "true"
    env: dict[str, str] = {}
    kill: str = ""
    rewards: dict[str, float] = {}
    network_in: tuple[Any, ...] = ()
    sidecars: tuple[str, ...] = ()
    run_s: float | None = None
    fails: str = ""


def _spec(instance: TaskInstance, env: dict[str, str] | None = None) -> SandboxSpec:
    return SandboxSpec(
        limits=SandboxLimits(memory_mb=500, disk_mb=200), env=env or {}, network_in=instance.network_in, cpus=1
    )


class TaskHandler(Handler[TaskInstance]):
    """Scored by its files alone, in a fresh sandbox of another working directory."""

    data_source: ClassVar[str] = "plain"
    instance_type: ClassVar[type[BaseModel]] = TaskInstance
    agent: ClassVar[str] = "commands"

    def needs(self) -> TaskNeeds:
        return TaskNeeds(sidecars=self.instance.sidecars, network_in=self.instance.network_in)

    def task_times(self) -> TaskTimes:
        return TaskTimes(run_s=self.instance.run_s)

    def sandbox(self) -> SandboxSpec | None:
        return _spec(self.instance, expanded(self.instance.env, self.task.batch.secrets))

    def messages(self) -> list[Message]:
        return [{"role": "user", "content": command} for command in self.instance.commands[:1]]

    async def prepare(self, sandbox: Sandbox) -> None:
        if self.task.archive is not None:
            await sandbox.upload(self.task.archive, "/task")

    async def collect(self, sandbox: Sandbox | None, answer: str | None) -> Submission:
        if self.instance.fails:
            raise HandlerError(expanded({"": self.instance.fails}, self.task.batch.secrets)[""], retryable=False)
        return Submission(answer=answer)

    def evaluator(self, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        return CommandEvaluator(self.instance)


class LeftHandler(TaskHandler):
    """Scored by the files that the policy left."""

    data_source: ClassVar[str] = "left"
    keeps_layer: ClassVar[bool] = True

    def evaluator(self, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        return CommandEvaluator(self.instance, layer=True)


class ServiceHandler(TaskHandler):
    """Scored before its sandbox is stopped."""

    data_source: ClassVar[str] = "service"
    scores_running: ClassVar[bool] = True


class SteppedHandler(TaskHandler):
    """A command per step; each leaves a record of its check's output."""

    data_source: ClassVar[str] = "stepped"

    async def next_messages(
        self,
        sandbox: Sandbox | None,
        n_done: int,
        answer: str | None,
        steps: Sequence[dict[str, Any]],
        fresh: FreshSandbox,
    ) -> NextTurn:
        assert len(steps) == n_done - 1
        messages = [{"role": "user", "content": command} for command in self.instance.commands[n_done : n_done + 1]]
        return NextTurn(messages, {"answer": answer, "n": n_done} if messages else {})

    def evaluator(self, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        return StepEvaluator()


class ImagedInstance(TaskInstance):
    """With another image, and packages."""

    image: str = "host"
    packages: tuple[str, ...] = ()


class ImagedHandler(TaskHandler):
    """Its sandbox has an image or packages that may be unavailable."""

    data_source: ClassVar[str] = "imaged"
    instance_type: ClassVar[type[TaskInstance]] = ImagedInstance

    def sandbox(self) -> SandboxSpec | None:
        assert isinstance(self.instance, ImagedInstance)
        spec = super().sandbox()
        assert spec is not None
        return spec.model_copy(update={"image": self.instance.image, "packages": self.instance.packages})


class CommandEvaluator:
    """Runs the check in a sandbox; its exit code decides."""

    name: ClassVar[str] = "commands"

    def __init__(self, instance: TaskInstance, layer: bool = False) -> None:
        self._instance = instance
        self._layer = layer

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        spec = _spec(self._instance).model_copy(update={"workdir": "/elsewhere"})
        async with fresh(spec, layer=self._layer) as sandbox:
            return await self.evaluate_running(submission, sandbox, fresh, timeout_s)

    async def evaluate_running(
        self, submission: Submission, sandbox: Sandbox, fresh: FreshSandbox, timeout_s: float
    ) -> Score:
        if self._instance.kill:
            _be_killed_once(Path(self._instance.kill))
        result = await sandbox.exec(["bash", "-c", self._instance.check], timeout_s=timeout_s)
        details = {"output": (result.stdout + result.stderr).decode(errors="replace")}
        if self._instance.rewards:
            return Score(details=details, rewards=self._instance.rewards)
        return Score(float(result.code == 0), details)


def _be_killed_once(mark: Path) -> None:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class StepEvaluator:
    """Counts steps."""

    name: ClassVar[str] = "steps"

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        return Score(float(len(submission.steps)), {"steps": submission.steps, "answer": submission.answer})


class CommandAgent:
    """Runs the given commands, and answers with their output."""

    async def run(self, context: AgentContext) -> AgentResult:
        assert context.sandbox is not None
        messages: Sequence[Message] = context.messages
        n_done, answer = 0, ""
        while messages:
            result = await context.sandbox.exec(["bash", "-c", messages[-1]["content"]], timeout_s=60.0)
            answer = (result.stdout + result.stderr).decode(errors="replace")
            n_done += 1
            messages = () if context.next_messages is None else await context.next_messages(n_done, answer)
        return AgentResult(Outcome.SUBMITTED, answer)
