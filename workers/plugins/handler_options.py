"""Protocols that a handler may follow beside `Handler`; each costs nothing to handlers that leave it out.

They are found by their methods and attributes, so a handler need not derive from anything of ours.
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
    """A rollout as its handler may know it, beyond its instance."""

    archive: Path | None = None
    """The instance's task archive, unpacked in a folder of this node that all rollouts share: not to be written to."""
    archive_digest: str = ""
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    """`BatchRequest.secrets`; `farm.records.variable_expansion.expanded` puts them into a task's tables."""
    limits: Limits = field(default_factory=Limits)
    """The batch's, with the task's own times."""
    verification: VerificationRule = "guarded"
    """`BatchRequest.verification`."""


@dataclass(frozen=True, slots=True)
class NextTurn:
    """The next step of a task: messages to the policy, none if the task has ended.

    `record` is JSON about the step that ended, such as its reward; it is kept in `Submission.steps` if it is not empty.
    """

    messages: Sequence[Message] = ()
    record: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class BoundHandler(Protocol):
    """A handler that needs more than the instance, such as its archive or secrets."""

    def for_task(self, task: TaskContext) -> Handler:
        """Return the handler of one rollout: all other methods are called on that. Cheap; called in every stage."""
        ...


@runtime_checkable
class ChoosesCalls(Protocol):
    """A handler that knows which model calls of its tasks should train."""

    def train_calls(self, instance: Any, calls: Sequence[ModelCall]) -> Collection[int]:
        """Return the indexes of those of `calls` that train; they are the ones that the batch's own rule takes."""
        ...


@runtime_checkable
class PlaysWithoutSandbox(Protocol):
    """A handler whose `sandbox` is None for every instance: with `without_sandbox = True` no rollout waits for init.

    Once a node has seen such a handler, its rollouts begin with the run stage, unless their batch names an agent.
    """

    without_sandbox: ClassVar[bool]


@runtime_checkable
class HasNeeds(Protocol):
    """A handler whose tasks may ask for what the farm has not."""

    def needs(self, instance: Any) -> TaskNeeds:
        """Return what the task asks for. Called at submit, without archive and secrets: from the fields alone."""
        ...


@runtime_checkable
class HasTaskTimes(Protocol):
    """A handler whose tasks state time limits of their own; `Limits.with_task_times` is the rule that combines them."""

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
        """Return the next step, asked each time the policy has answered or submitted; `n_done` counts those times.

        `steps` are the records so far. It may score the step, in a fresh sandbox or, with `layer=True`, in a copy of
        this one without its processes, and prepare the next one: it has the time of scoring (`eval_s`), which is not
        the policy's. The limits of turns, tokens and time are over all steps.
        """
        ...


class NothingLeft(Exception):
    """The policy broke its sandbox, or left more than can be copied: there is no layer, and the score is 0.

    Raised by `fresh(layer=True)`. An evaluator lets it pass; `next_messages` ends its task.
    """


@runtime_checkable
class KeepsLayer(Protocol):
    """A handler whose evaluator opens `fresh(layer=True)`: True keeps the files that the policy left."""

    keeps_layer: ClassVar[bool]


@dataclass(frozen=True, slots=True)
class RestoredFiles:
    """Parts of a layer that are left out of it, so that what the image has there is in the sandbox again.

    `trees` and `files` are absolute paths. With `system`, so is all that loaders, interpreters and shells look at by
    themselves, by the rule of `workers/sandboxes/isolation/restoring/footprint.py`. `named` are the absolute paths that
    the task is about: what the image has there may be changed, but for programs, libraries and modules. `programs` are
    names that scoring calls: a new program of such a name stays only if a package manager recorded it. `footprint` are
    absolute paths that stay whatever they are; one with a `/` at its end is a folder with all below it.
    """

    trees: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    system: bool = False
    named: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    footprint: tuple[str, ...] = ()


@runtime_checkable
class RestoresFiles(Protocol):
    """A handler that keeps the layer, and says which parts of it are not the policy's to leave."""

    def restored(self, instance: Any) -> RestoredFiles:
        """Return the parts that scoring finds as the image has them. From the fields and the task archive."""
        ...


@runtime_checkable
class ScoresRunning(Protocol):
    """A handler whose tasks are scored in the sandbox the policy left, before it is stopped, as they test a service.

    With `scores_running = True` its evaluators are `RunningEvaluator`s. Processes of the policy are alive meanwhile,
    and may do what they like to what scores them: use it only where a service itself is the task.
    """

    scores_running: ClassVar[bool]


@runtime_checkable
class ScoresServices(Protocol):
    """A handler whose tests may use what listens in the sandbox, such as a server that the policy started.

    Its evaluators are `RunningEvaluator`s. If something listens when the policy has ended, it is scored before its
    sandbox is stopped, and the sandboxes of `fresh(layer=True)` reach that at the same addresses.
    """

    def tests_services(self, instance: Any) -> bool:
        """Return whether this instance is scored so. From the fields and the task archive."""
        ...


@runtime_checkable
class ScoresCalls(Protocol):
    """A handler whose evaluators may reward single model calls and training rows: `Score.call_rewards`, `row_rewards`.

    With `scores_calls = True` they find the calls in `Submission.calls`, which is stored once more with the submission.
    """

    scores_calls: ClassVar[bool]


@runtime_checkable
class RunningEvaluator(Protocol):
    """An `Evaluator` that scores in the sandbox the policy left, in the run stage.

    Scoring again gives that score, as there is no such sandbox any more. What breaks it is played again. `evaluate` is
    asked where the policy broke its sandbox, so that there is none to score in.
    """

    name: ClassVar[str]

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score: ...

    async def evaluate_running(
        self, submission: Submission, sandbox: Sandbox, fresh: FreshSandbox, timeout_s: float
    ) -> Score: ...


def keeps_layer(handler: Handler) -> bool:
    """Return whether the layer that the policy leaves is to be kept."""
    return follows(handler, KeepsLayer) and bool(handler.keeps_layer)


def without_sandbox(handler: Handler) -> bool:
    """Return whether it declares that none of its instances has a sandbox."""
    return follows(handler, PlaysWithoutSandbox) and bool(handler.without_sandbox)


def scores_calls(handler: Handler) -> bool:
    """Return whether its evaluators are shown the model calls."""
    return follows(handler, ScoresCalls) and bool(handler.scores_calls)


def scores_running(handler: Handler) -> bool:
    """Return whether it is scored before its sandbox is stopped."""
    return follows(handler, ScoresRunning) and bool(handler.scores_running)
