"""The plug-in surface in one module: the promises of Handler, Sandbox, Tool, Agent, Evaluator and Policy.

A plug-in is a class or factory, registered by an entry point in one of the groups `farm.handlers`, `farm.sandboxes`,
`farm.tools` and `farm.agents`; `workers/plugins/registry.py` loads it. Coroutines run on the worker's single event
loop: they must not block it. They are cancelled with their rollout and must let the cancellation propagate.

The engine kinds (LLM servers) of the group `farm.engines` are defined in `workers/policy/engines/kind.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from pydantic import BaseModel

from farm.records.request import AgentRequests, Limits, SamplingParams, SandboxLimits, SandboxSpec
from farm.records.rollout import Outcome
from farm.records.submission import Score as Score
from farm.records.submission import Submission as Submission
from farm.records.trajectory import Completion as Completion
from farm.records.trajectory import Message, ModelCall

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionToolParam

Record: TypeAlias = Callable[[ModelCall], Awaitable[None]]
"""Stores a model call; called a second time with the same index once its observations are known."""
NextMessages: TypeAlias = Callable[[int, str | None], Awaitable[Sequence[Message]]]
"""Returns further user messages, or none, given the number of ended steps and the last step's answer."""
Verify: TypeAlias = Callable[[str, Mapping[str, Any], Mapping[str, Any], str], Awaitable[float]]
"""Scores an answer to a reasoning-gym entry from 0 to 1. Arguments: family, entry, dataset settings, answer.

Runs in a separate process that can read nothing else. Raises EvaluatorError.
"""
MAX_TOKENS = 4096
"""Maximum number of tokens of an answer if the request sets none."""
NO_MODELS: Mapping[str, ChatModel] = MappingProxyType({})
"""The models of a batch that names no role."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of a command. `code` is None if it was killed at its time limit; output is truncated at a cap.

    `limit` describes the limit of the sandbox that ended the command, such as memory; empty if none did.
    """

    code: int | None
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    limit: str = ""


@dataclass(frozen=True, slots=True)
class ShellResult:
    """The result of a command in a persistent shell, or its state so far.

    `output` is stdout and stderr in the order written. Beyond a cap, `n_dropped` bytes are cut from the middle; `full`
    is then the output up to a higher cap, to keep as an artefact. `code` is None after a time limit and while the
    command runs. `restarted`: the shell was restarted (`exit`, `exec`, `kill -9 $$`). `running`: an interactive command
    still runs and accepts keys. `limit` is as in ExecResult. `note` is further information about the shell.
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
    """A by-product of a tool call, such as an image: kept with the rollout, not shown to the model."""

    name: str
    media_type: str
    data: bytes


@dataclass(frozen=True, slots=True)
class CellResult:
    """The result of a Python cell. `error` is the exception's name, or empty; `restarted`: the kernel lost its state.

    `output` is the text as written. Beyond a cap, `n_dropped` bytes are cut from the middle; `full` is as in
    ShellResult. `images` are rich results. `limit` is as in ExecResult.
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
    """A persistent bash in a sandbox: directory, variables and functions survive between calls."""

    async def run(self, command: str, timeout_s: float, *, interactive: bool = False) -> ShellResult:
        """Run a command of one or more lines. Any failure of it is a result; SandboxError if the sandbox is gone.

        An interactive command reads and writes the terminal and has no time limit. The call returns as soon as the
        command waits for input; `send` continues it. A plain command first ends the running interactive one.
        """
        ...

    async def send(self, keys: bytes, wait_s: float) -> ShellResult:
        """Type keys (b"\x03" is Ctrl-C, b"\x04" Ctrl-D, b"" only waits) to the interactive command and wait for output.

        Raises ToolError if no interactive command runs.
        """
        ...

    async def close(self) -> None: ...


class Kernel(Protocol):
    """One persistent Python, or another language's kernel, in a sandbox."""

    async def run(self, code: str, timeout_s: float) -> CellResult:
        """Run a cell; the output includes the value of its last expression."""
        ...

    async def restart(self) -> None:
        """Restart with an empty namespace."""
        ...

    async def close(self) -> None: ...


class Sandbox(Protocol):
    """A running sandbox: no network, host files or host environment; its own processes.

    Every method raises SandboxError, with the sandbox's id, if the sandbox is gone. Paths, and the targets of links,
    are resolved inside the sandbox.
    """

    sandbox_id: str
    socket_folder: Path
    """A folder on the node, mode 0700, visible in the sandbox as `/run/farm`: for Unix sockets in both directions."""

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
        """Run one command until it ends; after `timeout_s` kill it and all processes that it started.

        `limits` may lower memory and the per-process limits for this command.
        """
        ...

    async def open_shell(self) -> Shell:
        """Start a persistent bash."""
        ...

    async def open_kernel(self, name: str = "") -> Kernel:
        """Start IPython, or the image's Jupyter kernel `name`. Raises SandboxError if there is none."""
        ...

    async def read_file(self, path: str) -> bytes:
        """Return a file's contents. Raises ToolError if it does not exist, is too big or is not a regular file."""
        ...

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file and create its parent folders. Raises ToolError on failure."""
        ...

    async def upload(self, source: Path, path: str) -> None:
        """Copy a file or folder of the node to the full name `path`. Raises ToolError on failure."""
        ...

    async def download(self, path: str, target: Path) -> None:
        """Copy a file or folder to `target` on the node, which must not exist.

        Links are copied only if they stay within the folder; absolute ones become relative. Devices and sockets are
        skipped. Raises ToolError on failure.
        """
        ...

    async def stop(self) -> None:
        """Stop the sandbox and remove its processes, mounts and folder. Idempotent."""
        ...


class SandboxProvider(Protocol):
    """Starts sandboxes of one kind on this node, and attaches to those that another process of the node started.

    `auto` tries the installed kinds in descending order of `priority`, an optional int (default 0). A kind with a
    negative priority is used only by name. Optional methods are in `workers/sandboxes/optional_protocols.py`.
    """

    kind: ClassVar[str]

    def missing(self) -> str:
        """Return why this kind cannot run here and how to fix it; empty if it can run."""
        ...

    async def start(self, sandbox_id: str, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox; its id is unique on the node. Raises SandboxError."""
        ...

    async def attach(self, sandbox_id: str, spec: SandboxSpec) -> Sandbox:
        """Attach to a running sandbox of this node. Raises SandboxError if there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Observation:
    """The result of a tool call, for the model. `done` ends the rollout with `answer` as the submission.

    `artefacts` are kept with the rollout; the agent appends a line that names them.
    """

    text: str
    done: bool = False
    answer: str | None = None
    artefacts: tuple[Artefact, ...] = ()


class Tool(Protocol):
    """A tool of one rollout. The pydantic model `arguments` defines the JSON schema and validates the arguments."""

    name: ClassVar[str]
    description: ClassVar[str]
    arguments: ClassVar[type[BaseModel]]

    async def call(self, arguments: Any, timeout_s: float) -> Observation:
        """Run the tool. `arguments` is an instance of the `arguments` model. A ToolError is shown to the model."""
        ...

    async def close(self) -> None: ...


ToolFactory: TypeAlias = Callable[[Sandbox | None], Tool]


@dataclass(frozen=True, slots=True)
class Delta:
    """A streamed piece of an assistant message: content, or reasoning. Tool calls are not streamed."""

    text: str
    reasoning: bool = False


OnDelta: TypeAlias = Callable[[Delta], None]


class Policy(Protocol):
    """The LLM under training, served by any engine."""

    @property
    def blocked(self) -> str:
        """The reason why calls are blocked: no engine is reachable, or all are busy or hang. Empty if they are not."""
        ...

    @property
    def paused_s(self) -> float:
        """Total seconds for which calls were held back for new weights; not counted against any time limit."""
        ...

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[ChatCompletionToolParam],
        sampling: SamplingParams,
        max_tokens: int,
        on_delta: OnDelta | None = None,
    ) -> Completion:
        """Return the next assistant message. EngineError if no engine answers, LimitReached if the context is full.

        `messages` is the whole conversation. Calls may branch: several conversations of one rollout share a policy.
        Image parts of messages come from `workers.policy.message_images` and are passed on unchanged.
        """
        ...


Keep: TypeAlias = Callable[[int, Artefact], Awaitable[str]]
"""Stores an artefact of a turn, up to the rollout's cap; returns the name to fetch it by, or "" if not kept."""


@dataclass(slots=True)
class AgentContext:
    """The input of an agent: task, tools, limits, and the callbacks that record model calls and artefacts."""

    rollout_id: str
    messages: list[Message]
    tools: Mapping[str, Tool]
    policy: Policy
    sampling: SamplingParams
    limits: Limits
    record: Record
    keep: Keep
    sandbox: Sandbox | None = None
    """For agents that run inside the sandbox; agents that only use tools do not need it."""
    next_messages: NextMessages | None = None
    """Called each time the policy has answered or submitted. The returned messages continue the same conversation; an
    empty result ends the rollout. None if the task has one step."""
    instance: Any = None
    """The instance, for agents made for one kind of problem."""
    provider: Callable[[], SandboxProvider] | None = None
    """The batch's kind of sandbox, for agents that need a second sandbox. Raises NotFound if none can run."""
    rewards: list[float] | None = None
    """Rewards of an environment's steps: filled in step by step by the agent, and kept however the rollout ends."""
    models: Mapping[str, ChatModel] = field(default_factory=dict)
    """The LLMs of the batch's roles, by role."""
    agent_requests: AgentRequests = field(default_factory=AgentRequests)
    """The batch's rule for requests that not every engine can answer, for agents whose programs use the gateway."""
    verify: Verify | None = None
    """For agents whose environment lets the node verify answers; not charged to the rollout's time."""


@dataclass(frozen=True, slots=True)
class AgentResult:
    """The result of an agent: its outcome, and its answer, if any."""

    outcome: Outcome
    answer: str | None = None


class Agent(Protocol):
    """Runs one rollout. Reaching a limit ends it with an outcome, not with an error.

    An agent that runs inside the sandbox also has `sandbox(spec: SandboxSpec | None) -> SandboxSpec`. It returns the
    spec to run in, given the spec that the instance needs, if any. Scoring uses the handler's spec.
    """

    async def run(self, context: AgentContext) -> AgentResult:
        """Run the rollout to its end, and record each model call by `context.record`."""
        ...


class FreshSandbox(Protocol):
    """Opens sandboxes for an evaluator, one at a time; each is stopped when its block ends."""

    def __call__(self, spec: SandboxSpec | None = None, *, layer: bool = False) -> AbstractAsyncContextManager[Sandbox]:
        """Open a sandbox that the policy never touched, with the instance's own spec or another.

        With `layer` it has the files that the policy left, without the processes. The handler must have
        `keeps_layer = True`, and the spec the instance's image, packages and archives. Raises LayerMissing if the layer
        was too large to keep, `handler.NothingLeft` if there is none.
        """
        ...


class Evaluator(Protocol):
    """Scores a submission. EvaluatorError means that scoring failed, never that the submission is bad."""

    name: ClassVar[str]

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        """Return the score within `timeout_s` seconds. Raises EvaluatorError."""
        ...


class ChatModel(Protocol):
    """The LLM of a role besides the policy. Its output is never trained on."""

    @property
    def model(self) -> str:
        """The model's name; empty for the first model that the server lists."""
        ...

    @property
    def blocked(self) -> str:
        """The reason why calls are blocked, as in `Policy`; empty if they are not."""
        ...

    async def complete(self, messages: Sequence[Message], sampling: SamplingParams) -> str:
        """Return the text of its next message, without the reasoning. Limits concurrent calls and retries failures.

        Raises EngineError, which names the role, if there is no answer.
        """
        ...

    async def answer(
        self, messages: Sequence[Message], tools: Sequence[ChatCompletionToolParam], sampling: SamplingParams
    ) -> Completion:
        """Return its next message, with tool calls; otherwise like `complete`."""
        ...
