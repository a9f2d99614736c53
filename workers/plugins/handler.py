"""Handlers: everything specific to one kind of problem.

A handler is a class, named by an entry point in the group `farm.handlers`. The farm makes an object of it for each
rollout and stage, from the validated instance and the rollout's `TaskContext`; the client makes one when a batch is
submitted. `docs/how-to/plugins/handlers.md` shows one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel

from farm.records.request import BatchSettings, SandboxSpec, TaskTimes
from farm.records.task_needs import TaskNeeds
from farm.records.trajectory import Message, ModelCall
from workers.config import WorkerConfig, own_config
from workers.plugins.interfaces import NO_MODELS, ChatModel, Evaluator, FreshSandbox, Sandbox, Score, Submission

I = TypeVar("I", bound=BaseModel)  # noqa: E741


@dataclass(frozen=True, slots=True)
class TaskContext:
    """Data about a rollout in addition to its instance. At submit there is no archive."""

    batch: BatchSettings = field(default_factory=BatchSettings)
    """The batch's settings. Its `limits` are combined with the task's own times, once `task_times` was called.

    `farm.records.variable_expansion.expanded` inserts its `secrets` into a task's tables.
    """
    archive: Path | None = None
    """The unpacked task archive of the instance. The folder is shared by all rollouts of the node: read only."""
    archive_digest: str = ""
    config: WorkerConfig = field(default_factory=own_config)
    """The configuration of the node."""


@dataclass(frozen=True, slots=True)
class NextTurn:
    """The next step of a task: messages for the policy, empty if the task has ended.

    `record` is JSON about the step that ended, such as its reward. It is appended to `Submission.steps` unless empty.
    """

    messages: Sequence[Message] = ()
    record: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RestoredFiles:
    """Paths to remove from the policy's layer, so that the image's versions show through.

    `trees` and `files` are absolute paths. `system` adds everything that loaders, interpreters and shells read
    implicitly, by the rule of `workers/sandboxes/isolation/restoring/footprint.py`. `named` are the absolute paths of
    the task's subject: image files there may be changed, except programs, libraries and modules. `programs` are the
    names of programs that scoring runs: a new program with such a name is kept only if a package manager recorded it.
    `footprint` are absolute paths that are always kept; one that ends in `/` is a folder with all its contents.
    """

    trees: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    system: bool = False
    named: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    footprint: tuple[str, ...] = ()


class NothingLeft(Exception):
    """There is no layer to score: the policy broke its sandbox or wrote more than can be copied. The score is 0.

    Raised by `fresh(layer=True)`. An evaluator lets it propagate; raised in `next_messages`, it ends the task.
    """


class Handler(ABC, Generic[I]):
    """One problem of a kind. Only `data_source`, `instance_type`, `messages` and `evaluator` have no default."""

    data_source: ClassVar[str]
    instance_type: ClassVar[type[BaseModel]]
    agent: ClassVar[str] = "react"
    tools: ClassVar[Collection[str]] = ()
    """The names of the tools that the policy may call; `react` and other agents of the farm offer them."""

    prepares_once: ClassVar[bool] = False
    """True if `prepare` depends only on the instance and leaves nothing but files without hard links.

    It may then run once, and all samples of the instance start from its files.
    """
    collect_s: ClassVar[float] = 0.0
    """Time limit of `collect` in seconds, if larger than that of a tool call."""
    without_sandbox: ClassVar[bool] = False
    """True if `sandbox` is None for every instance; rollouts skip the init stage then.

    A node skips it once it has run one rollout of the handler, unless the batch names an agent.
    """
    keeps_layer: ClassVar[bool] = False
    """True if the evaluator opens `fresh(layer=True)`: the files that the policy wrote are kept."""
    scores_running: ClassVar[bool] = False
    """True to score in the policy's sandbox before it is stopped, as its tasks test a service.

    Evaluators are `RunningEvaluator`s then. The policy's processes still run and can tamper with the scoring: use it
    only if a running service is the task itself.
    """
    scores_calls: ClassVar[bool] = False
    """True if evaluators may reward single model calls and rows: `Score.call_rewards`, `row_rewards`.

    They get the calls in `Submission.calls`, stored a second time with the submission.
    """

    def __init__(self, instance: I, task: TaskContext | None = None) -> None:
        """Keep the instance, which is valid, and the context. Called in every stage: keep it cheap."""
        self.instance = instance
        self.task = task or TaskContext()

    def needs(self) -> TaskNeeds:
        """Return the needs of the task that the farm may not provide. Called at submit, too."""
        return TaskNeeds()

    def roles(self) -> Collection[str]:
        """Return the roles besides the policy for which the instance needs an LLM.

        A batch that does not define them is refused. Called at submit, too.
        """
        return ()

    def task_times(self) -> TaskTimes:
        """Return the task's own time limits; `Limits.with_task_times` combines them with the batch's."""
        return TaskTimes()

    def sandbox(self) -> SandboxSpec | None:
        """Return the spec of the policy's sandbox, or None if the instance needs none. Called at submit, too."""
        return None

    @abstractmethod
    def messages(self) -> list[Message]:
        """Return the initial conversation."""

    async def prepare(self, sandbox: Sandbox) -> None:
        """Write files into the sandbox before the policy starts."""

    async def next_messages(
        self,
        sandbox: Sandbox | None,
        n_done: int,
        answer: str | None,
        steps: Sequence[dict[str, Any]],
        fresh: FreshSandbox,
    ) -> NextTurn:
        """Return the next step of a task with several steps in one conversation and one sandbox.

        Called each time the policy has answered or submitted; `n_done` is the number of calls. `steps` are the records
        so far. The method may score the finished step, in a fresh sandbox or, with `layer=True`, in a copy of this
        sandbox without its processes, and may prepare the next step. Its time limit is `eval_s`, which is not charged
        to the policy. The limits of turns, tokens and time cover all steps together.
        """
        return NextTurn()

    async def collect(self, sandbox: Sandbox | None, answer: str | None) -> Submission:
        """Read from the sandbox what the evaluator needs, after the agent has ended.

        The time limit is that of a tool call, or `collect_s` if larger. After a timeout (or a TimeoutError) it is
        called again, in a freshly prepared sandbox and in this one. If only this one is slow, because of the policy,
        only `answer` is scored; otherwise the timeout is an error and retried.
        """
        return Submission(answer=answer)

    def restored(self) -> RestoredFiles | None:
        """Return the paths of the kept layer to restore from the image before scoring; None for no restoring."""
        return None

    def tests_services(self) -> bool:
        """Return whether the tests may use services in the sandbox, such as a server that the policy started.

        Evaluators are `RunningEvaluator`s then. If a service listens after the policy has ended, scoring happens before
        the sandbox is stopped, and sandboxes of `fresh(layer=True)` reach the service at the same address.
        """
        return False

    def train_calls(self, calls: Sequence[ModelCall]) -> Collection[int]:
        """Return the indexes of those of `calls` that train; `calls` are those selected by the batch's rule."""
        return [call.index for call in calls]

    @abstractmethod
    def evaluator(self, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        """Return the evaluator. `models` holds the batch's roles, at least those that `roles` names."""


@runtime_checkable
class RunningEvaluator(Protocol):
    """An `Evaluator` that scores in the policy's sandbox, in the run stage.

    Scoring a rollout again returns the first score, as the sandbox no longer exists. If scoring fails, the rollout runs
    again. `evaluate` is called only if the policy broke its sandbox, so that `evaluate_running` is impossible.
    """

    name: ClassVar[str]

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score: ...

    async def evaluate_running(
        self, submission: Submission, sandbox: Sandbox, fresh: FreshSandbox, timeout_s: float
    ) -> Score: ...
