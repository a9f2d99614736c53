"""In-memory fakes of a policy, a tool and a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from farm.errors import SandboxError, ToolError
from farm.records.request import SamplingParams, SandboxLimits, SandboxSpec
from farm.records.trajectory import Message
from workers.plugins.interfaces import (
    CellResult,
    Completion,
    Delta,
    ExecResult,
    Kernel,
    Observation,
    OnDelta,
    Sandbox,
    Shell,
    ShellResult,
)


def answering(content: str, *, finish_reason: str = "stop", n_tokens: int = 10) -> Completion:
    """Return a completion with text only."""
    return _completion({"role": "assistant", "content": content}, finish_reason, n_tokens)


def calling(*calls: tuple[str, Any], content: str = "", n_tokens: int = 10) -> Completion:
    """Return a completion with tool calls, each a name and its arguments; text arguments are sent unchanged."""
    tool_calls = [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {
                "name": name,
                "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
            },
        }
        for index, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "tool_calls": tool_calls}
    return _completion(message, "tool_calls", n_tokens)


def _completion(message: Message, finish_reason: str, n_tokens: int) -> Completion:
    return Completion(
        response=message, finish_reason=finish_reason, engine="fake", n_prompt_tokens=5, n_response_tokens=n_tokens
    )


class ScriptedPolicy:
    """A policy that returns its script's completions in order, and raises its exceptions; it keeps `requests`."""

    def __init__(self, *script: Completion | Exception) -> None:
        self._script: Iterator[Completion | Exception] = iter(script)
        self.requests: list[tuple[list[Message], SamplingParams, int]] = []
        self.blocked = ""
        self.paused_s = 0.0

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        max_tokens: int,
        on_delta: OnDelta | None = None,
    ) -> Completion:
        self.requests.append((list(messages), sampling, max_tokens))
        answer = next(self._script, None)
        if answer is None:
            raise AssertionError("the policy was asked again after the last turn of its script")
        if isinstance(answer, Exception):
            raise answer
        if on_delta is not None and answer.response.get("content"):
            on_delta(Delta(answer.response["content"]))
        return answer


class ScriptedModel:
    """A ChatModel, the LLM of a role: returns its answers in order, repeats the last one, and raises exceptions.

    `requests` has the messages and sampling parameters that it was sent.
    """

    def __init__(self, *replies: str | Completion | Exception, model: str = "scripted") -> None:
        self._replies = list(replies)
        self.model = model
        self.blocked = ""
        self.requests: list[tuple[list[Message], SamplingParams]] = []

    async def complete(self, messages: Sequence[Message], sampling: SamplingParams) -> str:
        return str((await self.answer(messages, (), sampling)).response["content"])

    async def answer(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], sampling: SamplingParams
    ) -> Completion:
        self.requests.append((list(messages), sampling))
        reply = self._replies[min(len(self.requests), len(self._replies)) - 1]
        if isinstance(reply, Exception):
            raise reply
        return answering(reply) if isinstance(reply, str) else reply


class EchoArguments(BaseModel):
    """Arguments of EchoTool."""

    model_config = ConfigDict(extra="forbid")

    text: str = ""
    done: bool = False


class EchoTool:
    """Returns its own text, or raises the given error; `called` has the texts."""

    name: ClassVar[str] = "echo"
    description: ClassVar[str] = "Says the text again."
    arguments: ClassVar[type[BaseModel]] = EchoArguments

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self.called: list[str] = []

    async def call(self, arguments: EchoArguments, timeout_s: float) -> Observation:
        self.called.append(arguments.text)
        if self._error is not None:
            raise self._error
        return Observation(arguments.text, done=arguments.done, answer=arguments.text if arguments.done else None)

    async def close(self) -> None:
        """Nothing to close."""


Commands = Callable[[Sequence[str], bytes], ExecResult]
"""Simulates the programs of a sandbox: maps arguments and standard input to a result."""


def _succeed(argv: Sequence[str], stdin: bytes) -> ExecResult:
    return ExecResult(0, b"", b"")


class FakeSandbox:
    """A sandbox with in-memory files; a function answers its commands, which are recorded in `ran`.

    Files can be written, read, copied in and out; they are gone once it is stopped. It promises nothing else. No
    program runs: the function must apply a command's changes to `files` itself. Paths are plain keys: `a` and
    `/workspace/a` are two files; there are no links or modes. `workers.testing.local_sandbox` runs real commands.
    """

    def __init__(self, sandbox_id: str = "fake", commands: Commands = _succeed) -> None:
        self.sandbox_id = sandbox_id
        self.socket_folder = Path("/nonexistent", sandbox_id)
        self.files: dict[str, bytes] = {}
        self.ran: list[list[str]] = []
        self._commands = commands
        self._stopped = False

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
        self.check()
        self.ran.append(list(argv))
        return self._commands(argv, stdin)

    async def open_shell(self) -> Shell:
        self.check()
        return _FakeShell(self)

    async def open_kernel(self, name: str = "") -> Kernel:
        self.check()
        return _FakeKernel(self)

    async def read_file(self, path: str) -> bytes:
        self.check()
        if path not in self.files:
            raise ToolError(f"{path}: {'Is a directory' if self._below(path) else 'No such file or directory'}")
        return self.files[path]

    async def write_file(self, path: str, data: bytes) -> None:
        self.check()
        if self._below(path):
            raise ToolError(f"{path}: Is a directory")
        if above := next((str(folder) for folder in PurePosixPath(path).parents if str(folder) in self.files), ""):
            raise ToolError(f"{path}: {above} is not a directory")
        self.files[path] = data

    async def upload(self, source: Path, path: str) -> None:
        for name, data in _tree(source).items():
            await self.write_file(f"{path}/{name}" if name else path, data)

    async def download(self, path: str, target: Path) -> None:
        self.check()
        if _exists(target):
            raise ToolError(f"{target} already exists on the node")
        contents = {target.joinpath(name[len(path) :].strip("/")): self.files[name] for name in self._below(path)}
        if path in self.files:
            contents = {target: self.files[path]}
        if not contents:
            raise ToolError(f"{path}: No such file or directory")
        for destination, data in contents.items():
            destination.parent.mkdir(parents=True, exist_ok=True)
            destination.write_bytes(data)

    async def stop(self) -> None:
        self._stopped = True

    def _below(self, path: str) -> list[str]:
        return [name for name in self.files if name.startswith(f"{path}/")]

    def check(self) -> None:
        """Raise SandboxError if the sandbox is stopped."""
        if self._stopped:
            raise SandboxError(f"sandbox {self.sandbox_id} is stopped")


def _tree(source: Path) -> dict[str, bytes]:
    """Return a folder's files by relative path; a single file has the empty path. Raises ToolError."""
    try:
        if not source.is_dir():
            return {"": source.read_bytes()}
        return {str(path.relative_to(source)): path.read_bytes() for path in source.rglob("*") if path.is_file()}
    except OSError as error:
        raise ToolError(f"{source}: {error.strerror}") from error


def _exists(path: Path) -> bool:
    return path.exists() or path.is_symlink()


class _FakeShell:
    """Sends each command to the sandbox's function as `bash -c`; no command stays interactive."""

    def __init__(self, sandbox: FakeSandbox) -> None:
        self._sandbox = sandbox

    async def run(self, command: str, timeout_s: float, *, interactive: bool = False) -> ShellResult:
        result = await self._sandbox.exec(["bash", "-c", command], timeout_s=timeout_s)
        output = (result.stdout + result.stderr).decode("utf-8", "replace")
        return ShellResult(result.code, output, "/workspace", timed_out=result.timed_out, limit=result.limit)

    async def send(self, keys: bytes, wait_s: float) -> ShellResult:
        self._sandbox.check()
        raise ToolError("no interactive command runs")

    async def close(self) -> None:
        """Nothing to close."""


class _FakeKernel:
    def __init__(self, sandbox: FakeSandbox) -> None:
        self._sandbox = sandbox

    async def run(self, code: str, timeout_s: float) -> CellResult:
        result = await self._sandbox.exec(["python", "-c", code], timeout_s=timeout_s)
        output = (result.stdout + result.stderr).decode("utf-8", "replace")
        return CellResult(output, timed_out=result.timed_out, limit=result.limit)

    async def restart(self) -> None:
        """Do nothing: there is no state to lose."""
        self._sandbox.check()

    async def close(self) -> None:
        """Nothing to close."""


class FakeProvider:
    """A `workers.plugins.interfaces.SandboxProvider`. One function answers the commands of all its sandboxes."""

    kind: ClassVar[str] = "fake"

    def __init__(self, commands: Commands = _succeed) -> None:
        self.started: dict[str, FakeSandbox] = {}
        self._commands = commands

    def missing(self) -> str:
        return ""

    async def start(self, sandbox_id: str, spec: SandboxSpec) -> Sandbox:
        self.started[sandbox_id] = FakeSandbox(sandbox_id, self._commands)
        return self.started[sandbox_id]

    async def attach(self, sandbox_id: str, spec: SandboxSpec) -> Sandbox:
        if sandbox_id not in self.started:
            raise SandboxError(f"sandbox {sandbox_id}: no fake sandbox with this id was started")
        return self.started[sandbox_id]
