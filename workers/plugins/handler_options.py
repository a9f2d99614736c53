"""Optional protocols for handlers, in addition to `Handler`.

The farm detects them by their methods and attributes, so a handler needs no base class. Each one that a handler omits
costs nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from farm.plugins import follows
from farm.records.request import Limits, TaskTimes, VerificationRule
from farm.records.task_needs import TaskNeeds
from farm.records.trajectory import Message, ModelCall
from workers.plugins.interfaces import FreshSandbox, Handler, Sandbox, Score, Submission


@dataclass(frozen=True, slots=True)
class TaskContext:
    """Data about a rollout that a handler gets in addition to its instance."""

    archive: Path | None = None
    """The unpacked task archive of the instance. The folder is shared by all rollouts of the node: read only."""
    archive_digest: str = ""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """`BatchRequest.secrets`; `farm.records.variable_expansion.expanded` inserts them into a task's tables."""
    limits: Limits = field(default_factory=Limits)
    """The batch's limits, combined with the task's own times."""
    verification: VerificationRule = "guarded"
    """`BatchRequest.verification`."""


@dataclass(frozen=True, slots=True)
class NextTurn:
    """The next step of a task: messages for the policy, empty if the task has ended.

    `record` is JSON about the step that ended, such as its reward. It is appended to `Submission.steps` unless empty.
    """

    messages: Sequence[Message] = ()
    record: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class BoundHandler(Protocol):
    """A handler that needs more than the instance, such as the task archive or the secrets."""

    def for_task(self, task: TaskContext) -> Handler:
        """Return the handler of one rollout, which gets all other calls. Called in every stage: keep it cheap."""
        ...


@runtime_checkable
class ChoosesCalls(Protocol):
    """A handler that selects the model calls that train."""

    def train_calls(self, instance: Any, calls: Sequence[ModelCall]) -> Collection[int]:
        """Return the indexes of those of `calls` that train; `calls` are those selected by the batch's rule."""
        ...


@runtime_checkable
class PlaysWithoutSandbox(Protocol):
    """A handler whose `sandbox` is None for every instance. With `without_sandbox = True` rollouts skip the init stage.

    A node skips it once it has run one rollout of the handler, unless the batch names an agent.
    """

    without_sandbox: ClassVar[bool]


@runtime_checkable
class HasNeeds(Protocol):
    """A handler whose tasks may need something that the farm does not provide."""

    def needs(self, instance: Any) -> TaskNeeds:
        """Return the task's needs. Called at submit with the fields only, without task archive and secrets."""
        ...


@runtime_checkable
class HasTaskTimes(Protocol):
    """A handler whose tasks have their own time limits; `Limits.with_task_times` combines them with the batch's."""

    def task_times(self, instance: Any) -> TaskTimes: ...


@runtime_checkable
class ContinuesConversation(Protocol):
    """A handler whose tasks have several steps in one conversation and one sandbox."""

    async def next_messages(
        self,
        instance: Any,
        sandbox: Sandbox | None,
        n_done: int,
        answer: str | None,
        steps: Sequence[dict[str, Any]],
        fresh: FreshSandbox,
    ) -> NextTurn:
        """Return the next step. Called each time the policy has answered or submitted; `n_done` is the number of calls.

        `steps` are the records so far. The method may score the finished step, in a fresh sandbox or, with
        `layer=True`, in a copy of this sandbox without its processes, and may prepare the next step. Its time limit is
        `eval_s`, which is not charged to the policy. The limits of turns, tokens and time cover all steps together.
        """
        ...


class NothingLeft(Exception):
    """There is no layer to score: the policy broke its sandbox or wrote more than can be copied. The score is 0.

    Raised by `fresh(layer=True)`. An evaluator lets it propagate; raised in `next_messages`, it ends the task.
    """


@runtime_checkable
class KeepsLayer(Protocol):
    """A handler whose evaluator opens `fresh(layer=True)`; True keeps the files that the policy wrote."""

    keeps_layer: ClassVar[bool]


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


@runtime_checkable
class RestoresFiles(Protocol):
    """A handler that keeps the layer but restores parts of it from the image before scoring."""

    def restored(self, instance: Any) -> RestoredFiles:
        """Return the paths to restore. May use the fields and the task archive."""
        ...


@runtime_checkable
class ScoresRunning(Protocol):
    """A handler that scores in the policy's sandbox before it is stopped, because its tasks test a service.

    With `scores_running = True` its evaluators are `RunningEvaluator`s. The policy's processes still run and can tamper
    with the scoring: use it only if a running service is the task itself.
    """

    scores_running: ClassVar[bool]


@runtime_checkable
class ScoresServices(Protocol):
    """A handler whose tests may use services in the sandbox, such as a server that the policy started.

    Its evaluators are `RunningEvaluator`s. If a service listens after the policy has ended, scoring happens before the
    sandbox is stopped, and sandboxes of `fresh(layer=True)` reach the service at the same address.
    """

    def tests_services(self, instance: Any) -> bool:
        """Return whether the tests of this instance use services. May use the fields and the task archive."""
        ...


@runtime_checkable
class ScoresCalls(Protocol):
    """A handler whose evaluators may reward single model calls and rows: `Score.call_rewards`, `row_rewards`.

    With `scores_calls = True` evaluators get the calls in `Submission.calls`, stored a second time with the submission.
    """

    scores_calls: ClassVar[bool]


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


def keeps_layer(handler: Handler) -> bool:
    """Return whether the policy's layer is kept."""
    return follows(handler, KeepsLayer) and bool(handler.keeps_layer)


def without_sandbox(handler: Handler) -> bool:
    """Return whether none of its instances needs a sandbox."""
    return follows(handler, PlaysWithoutSandbox) and bool(handler.without_sandbox)


def scores_calls(handler: Handler) -> bool:
    """Return whether its evaluators get the model calls."""
    return follows(handler, ScoresCalls) and bool(handler.scores_calls)


def scores_running(handler: Handler) -> bool:
    """Return whether it scores before its sandbox is stopped."""
    return follows(handler, ScoresRunning) and bool(handler.scores_running)
