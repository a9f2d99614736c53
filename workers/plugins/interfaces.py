"""The plug-in surface on one page: what a Handler, Sandbox, Tool, Agent, Evaluator and Policy promise.

A plug-in is a class (or a factory) named by an entry point in one of the groups `farm.handlers`, `farm.sandboxes`,
`farm.tools` and `farm.agents`; `workers/plugins/registry.py` finds it. All methods that wait are coroutines on the
worker's one event loop; they are cancelled when the rollout is, and must let the cancellation through.

Kinds of LLM server, in the group `farm.engines`, have a page of their own: `workers/policy/engines/kind.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias

from pydantic import BaseModel

from farm.records.request import AgentRequests, Limits, SamplingParams, SandboxLimits, SandboxSpec
from farm.records.rollout import Outcome
from farm.records.scoring.score import Score as Score
from farm.records.submission import Submission as Submission
from farm.records.trajectory import Completion as Completion
from farm.records.trajectory import Message, ModelCall
from workers.plugins.roles import ChatModel


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of a command. `code` is None when it was killed at its time limit; output is cut at a cap.

    `limit` says in words which limit of the sandbox ended it, such as memory; empty if none did.
    """

    code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    limit: str = ""


@dataclass(frozen=True, slots=True)
class ShellResult:
    """The result of a command in a persistent shell, or its state so far.

    `output` is standard output and error in the order written, the middle cut out beyond a cap: `n_dropped` bytes;
    `full` is then all of it, up to a higher cap, to be kept as an artefact. `code` is None after a time limit and while
    the command runs; `restarted` says the shell had to be started anew (`exit`, `exec`, `kill -9 $$`); `running`, that
    an interactive command goes on and takes keys. `limit` as of ExecResult. `note` is more to know of the shell.
    """

    code: int | None
    output: str
    cwd: str
    timed_out: bool = False
    restarted: bool = False
    n_dropped: int = 0
    full: bytes | None = None
    running: bool = False
    limit: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Artefact:
    """Something a tool call made that is kept with the rollout and not shown to the model, such as an image."""

    name: str
    media_type: str
    data: bytes


@dataclass(frozen=True, slots=True)
class CellResult:
    """The result of a cell of Python: `error` is the exception's name, empty if none; `restarted` says state was lost.

    `output` is text as it was written, the middle cut out beyond a cap: `n_dropped` bytes; `full` as of ShellResult.
    `images` are rich results. `limit` as of ExecResult.
    """

    output: str
    error: str = ""
    timed_out: bool = False
    restarted: bool = False
    n_dropped: int = 0
    images: tuple[Artefact, ...] = ()
    limit: str = ""
    full: bytes | None = None


class Shell(Protocol):
    """One persistent bash in a sandbox: directory, variables and functions live from call to call."""

    async def run(self, command: str, timeout_s: float, *, interactive: bool = False) -> ShellResult:
        """Run a command of any number of lines. Whatever it does is a result; SandboxError if the sandbox is gone.

        An interactive command has the terminal as its input and output, is not ended by the time limit, and returns as
        soon as it waits for its user; `send` goes on with it. A plain one ends what runs interactively.
        """
        ...

    async def send(self, keys: bytes, wait_s: float) -> ShellResult:
        """Type keys (b"\x03" is Ctrl-C, b"\x04" Ctrl-D, b"" only waits) to the interactive command, and wait for more.

        Raises ToolError if none runs.
        """
        ...

    async def close(self) -> None: ...


class Kernel(Protocol):
    """One persistent Python, or another language's kernel, in a sandbox."""

    async def run(self, code: str, timeout_s: float) -> CellResult:
        """Run a cell; the value of its last expression is part of the output."""
        ...

    async def restart(self) -> None:
        """Begin anew, with nothing of what was defined."""
        ...

    async def close(self) -> None: ...


class Sandbox(Protocol):
    """A running sandbox: no network, no host files, no host environment, own processes.

    Every method raises SandboxError, with the sandbox's id, if the sandbox is gone. Paths are the sandbox's own; links
    lead where they lead inside.
    """

    sandbox_id: str
    socket_folder: Path
    """A folder on the node, mode 0700, that the sandbox sees as `/run/farm`: the way in and out for Unix sockets."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: SandboxLimits | None = None,
    ) -> ExecResult:
        """Run one command to its end, or kill it and what it started after `timeout_s`.

        Of `limits` those that are of each process, and memory, may be set lower for this command.
        """
        ...

    async def open_shell(self) -> Shell: ...

    async def open_kernel(self, name: str = "") -> Kernel:
        """IPython, driven directly; or the Jupyter kernel of that name which the image brings. SandboxError if none."""
        ...

    async def read_file(self, path: str) -> bytes:
        """The contents of a file. Raises ToolError if there is none, or it is too big or no regular file."""
        ...

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file, making its folders. Raises ToolError if that cannot be."""
        ...

    async def upload(self, source: Path, path: str) -> None:
        """Copy a file or a folder of the node to a path that is then its name. Raises ToolError if that cannot be."""
        ...

    async def download(self, path: str, target: Path) -> None:
        """Copy a file or a folder to the node, as `target`, which must not exist.

        Links are copied only if they stay within the folder, those by a whole path as relative ones; devices and
        sockets are not copied. Raises ToolError.
        """
        ...

    async def stop(self) -> None:
        """End it: no process, mount or folder is left. Harmless when repeated."""
        ...


class SandboxProvider(Protocol):
    """Starts sandboxes of one kind on this node, and finds those that another process of the node started.

    `auto` tries the installed kinds by their `priority`, an int, the highest first; it is 0 for those that have none. A
    kind below 0 is taken only by its name. `workers/sandboxes/optional_protocols.py` has what more a kind may do.
    """

    kind: ClassVar[str]

    def missing(self) -> str:
        """Return why this kind cannot run here and how to fix that; empty if it can."""
        ...

    async def start(self, sandbox_id: str, spec: SandboxSpec) -> Sandbox: ...

    async def attach(self, sandbox_id: str, spec: SandboxSpec) -> Sandbox:
        """A handle on a running sandbox of this node. Raises SandboxError if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of a tool call, for the model. `done` ends the rollout, with `answer` as what was submitted.

    `artefacts` are kept with the rollout; the agent adds a line that names them.
    """

    text: str
    done: bool = False
    answer: str | None = None
    artefacts: tuple[Artefact, ...] = ()


class Tool(Protocol):
    """One tool of one rollout. `arguments` is a pydantic model: it is the JSON schema and the check."""

    name: ClassVar[str]
    description: ClassVar[str]
    arguments: ClassVar[type[BaseModel]]

    async def call(self, arguments: Any, timeout_s: float) -> Observation:
        """`arguments` is an instance of the `arguments` model. ToolError is text for the model."""
        ...

    async def close(self) -> None: ...


ToolFactory: TypeAlias = Callable[[Sandbox | None], Tool]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an assistant message as it is sampled: of its text, or of its reasoning. Tool calls come whole."""

    text: str
    reasoning: bool = False


OnDelta: TypeAlias = Callable[[Delta], None]


class Policy(Protocol):
    """The LLM that plays, whichever engine that is."""

    @property
    def blocked(self) -> str:
        """The reason calls get no answer now: no engine can be reached, or all are busy or hang. Empty if they may."""
        ...

    @property
    def paused_s(self) -> float:
        """Seconds in total for which its calls were held back for new weights; they count against no time limit."""
        ...

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        max_tokens: int,
        on_delta: OnDelta | None = None,
    ) -> Completion:
        """The next assistant message. EngineError if no engine can give one; LimitReached if the context is full.

        `messages` are the whole conversation. Calls may branch: several conversations of one rollout share a policy.
        Images in them are parts of `workers.policy.message_images`, to be passed on as they are.
        """
        ...


Record: TypeAlias = Callable[[ModelCall], Awaitable[None]]
"""Writes a model call to the store; called again with the same index once its observations are known."""

Keep: TypeAlias = Callable[[int, Artefact], Awaitable[str]]
"""Stores an artefact of a turn, up to the rollout's cap; returns the name it can be fetched by, empty if not kept."""

NextMessages: TypeAlias = Callable[[int, str | None], Awaitable[Sequence[Message]]]
"""Asked with the number of steps that have ended, and the answer of the last: further user messages, or none."""


Verify: TypeAlias = Callable[[str, Mapping[str, Any], Mapping[str, Any], str], Awaitable[float]]
"""Scores an answer to an entry of a family of reasoning-gym, whose dataset has some settings, from 0 to 1.

The arguments are family, entry, settings, answer. It is scored in a process that reads nothing else; EvaluatorError.
"""


@dataclass(slots=True)
class AgentContext:
    """The input of an agent: its task, what it may use, and where model calls and artefacts are recorded."""

    rollout_id: str
    messages: list[Message]
    tools: Mapping[str, Tool]
    policy: Policy
    sampling: SamplingParams
    limits: Limits
    record: Record
    keep: Keep
    sandbox: Sandbox | None = None
    """For agents that run inside it; those that act by tools do not need it."""
    next_messages: NextMessages | None = None
    """To be asked whenever the policy has answered or submitted: what it returns goes on in the same conversation, and
    the play ends when that is nothing. None if the task has one step."""
    instance: Any = None
    """The instance that is played, for agents that are made for one kind of problem."""
    provider: Callable[[], SandboxProvider] | None = None
    """The batch's kind of sandbox, for agents that need one beside the rollout's. Raises NotFound if none can run."""
    rewards: list[float] | None = None
    """Rewards of an environment's steps: set by an agent that plays one, as they come, and kept however it ends."""
    models: Mapping[str, ChatModel] = field(default_factory=dict)
    """The LLMs of the batch's roles, by role."""
    agent_requests: AgentRequests = field(default_factory=AgentRequests)
    """The batch's rule for what not every engine can answer, for agents whose programs ask by a gateway."""
    verify: Verify | None = None
    """For agents whose environment leaves the verdict on an answer to the node; takes none of the rollout's time."""


@dataclass(frozen=True, slots=True)
class AgentResult:
    """The end of an agent's play: its outcome, and its answer, if any."""

    outcome: Outcome
    answer: str | None = None


class Agent(Protocol):
    """Plays one rollout. Limits end it with an outcome, never with an error.

    An agent that runs inside the sandbox has one more method, `sandbox(spec: SandboxSpec | None) -> SandboxSpec`: what
    it is played in, given what the instance needs, if anything. It is scored in what the handler asks for.
    """

    async def run(self, context: AgentContext) -> AgentResult: ...


class FreshSandbox(Protocol):
    """Opens sandboxes for an evaluator, one at a time; each is stopped on the way out."""

    def __call__(self, spec: SandboxSpec | None = None, *, layer: bool = False) -> AbstractAsyncContextManager[Sandbox]:
        """Open a sandbox that the policy never touched: of the instance's own spec, or of another.

        With `layer` its files are as the policy left them, without its processes: the handler must have
        `keeps_layer = True`, and the spec the instance's image, packages and archives. Raises LayerMissing if the layer
        was too large to be kept and is gone, `handler_options.NothingLeft` if the policy left none.
        """
        ...


class Evaluator(Protocol):
    """Scores a submission. EvaluatorError says that scoring broke, never that the submission is bad."""

    name: ClassVar[str]

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score: ...


class Handler(Protocol):
    """Everything particular to one kind of problem. `instance` is always an instance of `instance_type`.

    Optional methods are in `workers/plugins/handler_options.py`; LLMs of roles are in `workers/plugins/roles.py`.
    """

    data_source: ClassVar[str]
    instance_type: ClassVar[type[BaseModel]]
    agent: ClassVar[str]
    tools: ClassVar[Collection[str]]

    def sandbox(self, instance: Any) -> SandboxSpec | None:
        """Return the spec of the sandbox that it is played in; None if it needs none."""
        ...

    def messages(self, instance: Any) -> list[Message]:
        """The conversation the policy is given."""
        ...

    async def prepare(self, instance: Any, sandbox: Sandbox) -> None:
        """Stage files before the policy starts.

        A handler with `prepares_once = True` says that this depends on the instance alone and leaves nothing but files,
        none of them under two names: then it may be done once, and all samples of the instance start from these files.
        """
        ...

    async def collect(self, instance: Any, sandbox: Sandbox | None, answer: str | None) -> Submission:
        """Take from the sandbox what is to be scored, once the agent has ended.

        It gets as long as a tool call, or `collect_s` if the handler has that and it is more. What takes longer (or
        raises TimeoutError) is called again, in a fresh sandbox as prepared and in this one: if it was the policy that
        made it slow, `answer` alone is scored, and else it is an error that is tried again.
        """
        ...

    def evaluator(self, instance: Any) -> Evaluator: ...
