"""In-memory stand-ins for a policy, a tool and a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from farm.errors import SandboxError, ToolError
from farm.request import SamplingParams
from farm.trajectory import Message
from workers.interfaces import CellResult, Completion, ExecResult, Kernel, Observation, Shell, ShellResult


def answering(content: str, *, finish_reason: str = "stop", n_tokens: int = 10) -> Completion:
    """A completion of text alone."""
    message = {"role": "assistant", "content": content}
    return Completion(message, finish_reason, "fake", n_prompt_tokens=5, n_response_tokens=n_tokens)


def calling(*calls: tuple[str, Any], content: str = "", n_tokens: int = 10) -> Completion:
    """A completion that calls tools: name and arguments, which are sent as they are if they are text."""
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
    return Completion(message, "tool_calls", "fake", n_prompt_tokens=5, n_response_tokens=n_tokens)


class ScriptedPolicy:
    """Gives the completions of a script in order, raises those that are exceptions; `asked` holds what it was asked."""

    def __init__(self, *script: Completion | Exception) -> None:
        self._script: Iterator[Completion | Exception] = iter(script)
        self.asked: list[tuple[list[Message], SamplingParams, int]] = []

    async def complete(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], sampling: SamplingParams, max_tokens: int
    ) -> Completion:
        self.asked.append((list(messages), sampling, max_tokens))
        answer = next(self._script, None)
        if answer is None:
            raise AssertionError("the policy was asked once more than its script has turns")
        if isinstance(answer, Exception):
            raise answer
        return answer


class EchoArguments(BaseModel):
    """What EchoTool takes."""

    model_config = ConfigDict(extra="forbid")

    text: str = ""
    done: bool = False


class EchoTool:
    """Observes its own text, or raises what it is made with; `called` holds the texts."""

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
"""Stands for the programs of a sandbox: what an argument list and a standard input give."""


def _succeed(argv: Sequence[str], stdin: bytes) -> ExecResult:
    return ExecResult(0, b"", b"")


class FakeSandbox:
    """Files in memory; commands are answered by a function and kept in `ran`."""

    def __init__(self, sandbox_id: str = "fake", commands: Commands = _succeed) -> None:
        self.sandbox_id = sandbox_id
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
    ) -> ExecResult:
        self._check()
        self.ran.append(list(argv))
        return self._commands(argv, stdin)

    async def open_shell(self) -> Shell:
        self._check()
        return _FakeShell(self)

    async def open_kernel(self) -> Kernel:
        self._check()
        return _FakeKernel(self)

    async def read_file(self, path: str) -> bytes:
        self._check()
        if path not in self.files:
            raise ToolError(f"there is no file {path}")
        return self.files[path]

    async def write_file(self, path: str, data: bytes) -> None:
        self._check()
        self.files[path] = data

    async def stop(self) -> None:
        self._stopped = True

    def _check(self) -> None:
        if self._stopped:
            raise SandboxError(f"sandbox {self.sandbox_id} is stopped")


class _FakeShell:
    """Sends each command to the sandbox's function as `bash -c`."""

    def __init__(self, sandbox: FakeSandbox) -> None:
        self._sandbox = sandbox

    async def run(self, command: str, timeout_s: float) -> ShellResult:
        result = await self._sandbox.exec(["bash", "-c", command], timeout_s=timeout_s)
        output = (result.stdout + result.stderr).decode("utf-8", "replace")
        return ShellResult(result.code, output, "/workspace", timed_out=result.timed_out)

    async def close(self) -> None:
        """Nothing to close."""


class _FakeKernel:
    """Sends each cell to the sandbox's function as `python -c`."""

    def __init__(self, sandbox: FakeSandbox) -> None:
        self._sandbox = sandbox

    async def run(self, code: str, timeout_s: float) -> CellResult:
        result = await self._sandbox.exec(["python", "-c", code], timeout_s=timeout_s)
        return CellResult((result.stdout + result.stderr).decode("utf-8", "replace"), timed_out=result.timed_out)

    async def close(self) -> None:
        """Nothing to close."""
