"""An agent with its own loop: a command in the sandbox, whose model is the policy behind a recording gateway.

Its outcome follows from the recorded calls and the command's end. Only a command that ended normally, or by a limit of
the rollout, is scored; one that crashed, or made no model call, is an error with its log kept.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from farm.errors import AgentError, AgentMissing, RolloutError
from farm.records.request import Limits, SandboxSpec
from farm.records.rollout import Outcome
from farm.records.sandbox_spec import AgentProgram
from workers.agents.actions import cut
from workers.plugins.interfaces import AgentContext, AgentResult, Artefact, ExecResult, Sandbox
from workers.policy.gateway import relay
from workers.policy.gateway.app import MODEL, SOCKET, gateway
from workers.policy.gateway.calls import GatewayCalls
from workers.sandboxes.images.environments import AGENT_FOLDER

SOCKET_FOLDER = "/run/farm"
START_S = 300.0
GRACE_PERIOD_S = 5.0

_KILL_S = 10.0
_NEVER_S = 30 * 86_400.0
_LOG_BYTES = 1_000_000
_ANSWER_CHARS = 1_000_000
_LOG_LINES = 15
_LINE_CHARS = 400
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NOT_FOUND = 127
_EITHER = 'test -x "$0/bin/python" && exec "$0/bin/python" "$@"; exec python3 "$@"'

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Task:
    """The task of a command."""

    text: str
    """The user's request, without instructions for the farm's own tools."""
    limits: Limits
    base_url: str = ""
    """A placeholder for the gateway's address, without `/v1`: in the command's words, environment and files, it is
    replaced by the address inside the sandbox, once the port is known."""
    key: str = ""
    """The gateway's key, for this rollout only."""
    model: str = MODEL
    """The name of the policy; the gateway accepts any."""
    max_output_tokens: int = 0
    """Maximum tokens of an answer, by the limits of the rollout and of the batch."""
    context_tokens: int | None = None
    """Maximum tokens of a prompt and its answer together; None if the engines do not report it."""


def answered(output: str) -> AgentResult:
    """Return the whole output as the answer."""
    return AgentResult(Outcome.ANSWERED, output.strip() or None)


@dataclass(frozen=True, slots=True)
class Harness:
    """An agent's command line. Its clients find the model by the variables of `workers.policy.gateway.relay`."""

    name: str
    command: Callable[[Task], Sequence[str]]
    """Maps a task to the argument list, which is run in the sandbox's working folder."""
    packages: tuple[str, ...] = ()
    """Exact requirements of its own environment, in `/opt/farm/agent`, or paths of wheels."""
    python: str = ""
    """The oldest Python version that the packages support, such as `3.12`; empty for the farm's own."""
    programs: tuple[AgentProgram, ...] = ()
    """Further programs, each in `/opt/farm/NAME`: npm packages, folders, archives, images."""
    stdin: Callable[[Task], str] = lambda task: ""
    """Maps a task to the command's standard input, which may be longer than a command-line argument."""
    files: Callable[[Task], Mapping[str, str]] = lambda task: {}
    """Maps a task to files, path to text, outside the working folder, as that may be scored."""
    environment: Callable[[Task], Mapping[str, str]] | Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Task], Sequence[Sequence[str]]] = lambda task: ()
    """Maps a task to commands to run before, in order, without a model."""
    collect: Callable[[Task], Sequence[Sequence[str]]] = lambda task: ()
    """Maps a task to commands to run after the command has ended by itself, before its output is read."""
    output: str = ""
    """The file with its answer; empty for its standard output."""
    read: Callable[[str], AgentResult] = answered
    """Maps that output to the result. Raises ValueError, or any other error, if it is malformed."""


class HarnessAgent:
    """An agent that is a command in the rollout's sandbox; one object serves any number of concurrent rollouts.

    `inside` is the socket folder's path in the sandbox; `start_s` limits the time until the command's first model call,
    `grace_s` its time after the gateway has stopped answering.
    """

    def __init__(
        self,
        harness: Harness,
        *,
        inside: str = SOCKET_FOLDER,
        start_s: float = START_S,
        grace_s: float = GRACE_PERIOD_S,
    ) -> None:
        self._harness = harness
        self._inside = inside
        self._start_s = start_s
        self._grace_s = grace_s

    def sandbox(self, spec: SandboxSpec | None) -> SandboxSpec:
        """Return the sandbox for a rollout: the instance's, if any, with the agent's packages."""
        fields = (spec or SandboxSpec()).model_dump() | {
            "agent_packages": self._harness.packages,
            "agent_python": self._harness.python,
            "agent_programs": self._harness.programs,
        }
        try:
            return SandboxSpec.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            location = ".".join(map(str, first["loc"]))
            raise AgentMissing(f"agent {self._harness.name}: {location}: {first['msg']}", retryable=False) from error

    async def run(self, context: AgentContext) -> AgentResult:
        """Run a rollout to its end. Raises EngineError, SandboxError, and AgentError if the command crashed."""
        sandbox = context.sandbox
        if sandbox is None:
            raise AgentError(f"{context.rollout_id}: agent {self._harness.name} needs a sandbox, and there is none")
        calls = GatewayCalls(context)
        command: asyncio.Future[ExecResult] | None = None
        try:
            async with gateway(calls, sandbox.socket_folder) as address:
                mark = f"http://farm-gateway-{secrets.token_hex(8)}"
                budget = calls.token_budget
                # System messages are the farm's own, about tools that the command does not have.
                texts = [str(message["content"]) for message in context.messages if message["role"] == "user"]
                task = Task(
                    "\n\n".join(texts),
                    context.limits,
                    mark,
                    address.key,
                    max_output_tokens=budget.output_tokens,
                    context_tokens=budget.context_tokens,
                )
                _check_marks(self._harness, task)
                files = self._harness.files(task)
                for path, text in files.items():
                    await sandbox.write_file(path, text.encode())
                await self._steps(context, sandbox, "prepare", task)
                command = asyncio.ensure_future(self._command(sandbox, task, files))
                given_up = await self._watch(command, calls, context.limits.run_s)
        except BaseException:
            # Such as the deadline: its log is as useful as any other.
            if command is not None:
                await self._keep_log(context, calls, command)
            raise
        end = _End(context, self._harness, calls, await _ended(command), given_up)
        await end.keep_log()
        end.check()
        if calls.limit is None:
            await self._steps(context, sandbox, "collect", task)
        return await end.result(sandbox)

    async def _steps(self, context: AgentContext, sandbox: Sandbox, phase: str, task: Task) -> None:
        """Run the commands before or after. Raises AgentError if one fails."""
        harness = self._harness
        for words in (harness.prepare if phase == "prepare" else harness.collect)(task):
            result = await sandbox.exec(words, timeout_s=context.limits.tool_s, env=_variables(harness, task))
            if result.code != 0:
                output = " | ".join(_lines((result.stdout + result.stderr).decode("utf-8", "replace"))[-_LOG_LINES:])
                why = f"ended with code {result.code}" if result.code is not None else "took too long"
                what = f"agent {harness.name}: {phase}: {words[0]} {why}"
                raise AgentError(f"{context.rollout_id}: {what}: {output or 'no output'}")

    async def _keep_log(self, context: AgentContext, calls: GatewayCalls, command: asyncio.Future[ExecResult]) -> None:
        try:
            await _End(context, self._harness, calls, await _ended(command), "").keep_log()
        except Exception as error:
            log.warning("Rollout %s: output of agent %s is lost: %s", context.rollout_id, self._harness.name, error)

    async def _command(self, sandbox: Sandbox, task: Task, files: Iterable[str]) -> ExecResult:
        harness = self._harness
        python = [f"{AGENT_FOLDER}/bin/python" if harness.packages else "python3"]
        if harness.programs and not harness.packages:
            # Its own environment exists, unless the farm's Python is unavailable in this image.
            python = ["sh", "-c", _EITHER, AGENT_FOLDER]
        # -I: files in the working folder must not be imported.
        relayed = [*python, "-I", "-c", _relay_source(), f"{self._inside}/{SOCKET}", task.key]
        return await sandbox.exec(
            [*relayed, task.base_url, json.dumps(list(files)), *harness.command(task)],
            # The caller enforces the deadline by cancelling, as engine pauses do not count.
            timeout_s=_NEVER_S,
            stdin=harness.stdin(task).encode(),
            env=_variables(harness, task),
        )

    async def _watch(self, command: asyncio.Future[ExecResult], calls: GatewayCalls, run_s: float) -> str:
        """Wait for the command's end; return why it must be ended, empty if it ended by itself."""
        start_s = min(self._start_s, 0.9 * run_s)
        if not await _first(command, calls.begun, start_s):
            return f"sent no request to its model within {start_s:g} s"
        await _first(command, calls.over, None)
        await asyncio.wait({command}, timeout=self._grace_s)
        return "" if command.done() else "went on without a model"


def _check_marks(harness: Harness, task: Task) -> None:
    """Raise AgentMissing if the address is used where it cannot be replaced, as no port is known yet."""
    steps = {"prepare": harness.prepare(task), "collect": harness.collect(task)}
    texts = {name: [word for words in given for word in words] for name, given in steps.items()}
    for name, given in (texts | {"stdin": [harness.stdin(task)]}).items():
        if any(task.base_url in text for text in given):
            raise AgentMissing(
                f"agent {harness.name}: {name} uses the gateway's address, which only the command knows: "
                "use it in command, environment or files",
                retryable=False,
            )


def _variables(harness: Harness, task: Task) -> Mapping[str, str]:
    return harness.environment(task) if callable(harness.environment) else harness.environment


async def _first(command: asyncio.Future[ExecResult], event: asyncio.Event, timeout_s: float | None) -> bool:
    waiting = asyncio.ensure_future(event.wait())
    either: set[asyncio.Future[Any]] = {command, waiting}
    try:
        done, _ = await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        waiting.cancel()


async def _ended(command: asyncio.Future[ExecResult]) -> ExecResult | None:
    """Return the command's result, once its relay ends it after the gateway; None if killed. Raises SandboxError."""
    try:
        await asyncio.wait({command}, timeout=_KILL_S)
        return command.result() if command.done() else None
    finally:
        command.cancel()
        await asyncio.gather(command, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _End:
    context: AgentContext
    harness: Harness
    calls: GatewayCalls
    ended: ExecResult | None
    given_up: str
    """The reason why it was ended; empty if it ended by itself."""

    async def keep_log(self) -> None:
        if self.ended is not None:
            for name, data in (("stdout", self.ended.stdout), ("stderr", self.ended.stderr)):
                if data.strip():
                    artefact = Artefact(f"{self.harness.name}.{name}.txt", "text/plain", data[-_LOG_BYTES:])
                    await self.context.keep(max(0, self.calls.n_answered - 1), artefact)

    def check(self) -> None:
        """Raise the error, if any; a limit of the rollout excuses its consequences.

        The gateway's failures come first: a command may crash on them, or end normally.
        """
        failure = self.calls.failure
        if isinstance(failure, RolloutError):
            raise failure
        if failure is not None:
            raise self._crashed(f"was refused an answer ({type(failure).__name__}: {failure})") from failure
        if self.calls.limit is not None:
            return
        if self.given_up or self.ended is None:
            raise self._crashed(f"{self.given_up or 'did not end'}, and was ended")
        if self.ended.code != 0:
            raise self._crashed(_how(self.ended))
        if self.calls.n_answered == 0:
            raise self._crashed("ended without any answer of its model")

    async def result(self, sandbox: Sandbox) -> AgentResult:
        """Return the result of a successful command."""
        if self.calls.limit is not None:
            return AgentResult(self.calls.limit.outcome)
        assert self.ended is not None
        harness = self.harness
        try:
            data = await sandbox.read_file(harness.output) if harness.output else self.ended.stdout
            result = harness.read(data.decode("utf-8", "replace"))
            if result.answer is not None and not isinstance(result.answer, str):
                raise TypeError(f"its answer must be a text, not {type(result.answer).__name__}")
        except RolloutError:
            raise
        except Exception as error:
            # The policy's programs may have written the file.
            raise self._crashed(f"did not leave a valid output: {type(error).__name__}: {error}") from error
        return replace(result, answer=result.answer and _fit(result.answer))

    def _crashed(self, how: str) -> AgentError:
        ended, rollout_id = self.ended, self.context.rollout_id
        streams = [] if ended is None else [ended.stdout, ended.stderr]
        lines = [line for data in streams for line in _lines(data[-_LOG_BYTES:].decode("utf-8", "replace"))]
        why = " ".join(_lines(how))
        output = "\n".join(lines[-_LOG_LINES:]) or "nothing"
        return AgentError(
            f"{rollout_id}: agent {self.harness.name} {why}. Its output, kept for `farm artefacts {rollout_id}`, ends: "
            f"{output}"
        )


def _fit(answer: str) -> str:
    """Return an answer that a database accepts: of bounded length, without NUL and incomplete characters."""
    return answer[:_ANSWER_CHARS].replace("\0", "").encode("utf-8", "replace").decode()


def _lines(text: str) -> list[str]:
    """Return the lines of a text, short enough for a message and without control characters."""
    lines = ["".join(filter(str.isprintable, line)) for line in _COLOUR.sub("", text).splitlines()]
    return [cut(line, _LINE_CHARS) for line in lines if line.strip()]


def _how(ended: ExecResult) -> str:
    if ended.code == _NOT_FOUND and ended.stderr.startswith(b"sandbox: python3:"):
        return "cannot reach its model without a python3, which its image lacks: a Harness with `packages` has its own"
    if ended.code == _NOT_FOUND and ended.stderr.startswith(f"sandbox: {AGENT_FOLDER}/".encode()):
        return "has a Python that does not start in its image: it is the node's, and needs a C library like the node's"
    limit = f", as it reached a limit of its sandbox: {ended.limit}" if ended.limit else ""
    return f"ended with code {ended.code}{limit}"


@cache
def _relay_source() -> str:
    return Path(relay.__file__).read_text(encoding="utf-8")
