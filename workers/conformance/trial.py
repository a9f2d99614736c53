"""A promise, one public statement about a sandbox; the context in which it is tried, with its clean-up; and assertions
for promises, whose failures read as sentences.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import secrets
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

from farm.records.request import SandboxSpec
from workers.conformance import outside
from workers.plugins.interfaces import CellResult, ExecResult, Kernel, Sandbox, SandboxProvider, Shell, ShellResult

DEADLINE_S = 15.0
_POLL_S = 0.1
_SHOWN = 300

GREETING = {"GREETING": "hello"}
"""Additional environment variables of the shared sandbox."""

TIME_S = 60.0
"""Default time limit of a promise in seconds, including the start of sandboxes."""

Check: TypeAlias = "Callable[[PromiseTrial], Awaitable[None]]"
"""Raises AssertionError, with a message for users, if the promise is broken; NotTried if it cannot be checked."""


class NotTried(Exception):
    """A promise cannot be checked here; the message tells why."""


class NotPermitted(NotTried):
    """Trying a promise needs a right that this user lacks, and that no installation would give."""


def short(value: object) -> str:
    """Return a value, shortened to fit into a sentence."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}"


def same(actual: object, expected: object, what: str) -> None:
    """Check that `actual` equals `expected`; `what` is a noun phrase, such as "the exit code"."""
    assert actual == expected, f"{what} should be {short(expected)} and is {short(actual)}"


@contextmanager
def raises(kind: type[Exception], *words: str) -> Iterator[None]:
    """Check that the block raises an error of this kind, with all of the words in its message."""
    message = None
    try:
        yield
    except kind as error:
        message = str(error)
    assert message is not None, f"{kind.__name__} should have been raised"
    missing = [word for word in words if word not in message]
    assert not missing, f"{kind.__name__} should name {', '.join(missing)} and says: {short(message)}"


@asynccontextmanager
async def within(seconds: float) -> AsyncIterator[None]:
    """Fail if the block does not end in time."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        assert not limit.expired(), f"it should be done within {seconds:.0f} s, and was not"
        raise


async def eventually(condition: Callable[[], Awaitable[bool]], what: str, within_s: float = DEADLINE_S) -> None:
    """Check a condition repeatedly until it holds or the time is over; `what` ends the sentence "waiting until"."""
    deadline = time.monotonic() + within_s
    while not await condition():
        assert time.monotonic() < deadline, f"timed out after {within_s:.0f} s of waiting until {what}"
        await asyncio.sleep(_POLL_S)


async def until(condition: Callable[[], object], what: str, within_s: float = DEADLINE_S) -> None:
    """Wait for a condition of the node; `what` ends the sentence "waiting until".

    The checks take at most a quarter of the time, so that the awaited process gets the CPUs.
    """
    began = time.monotonic()
    deadline = began + within_s
    while not condition():
        now = time.monotonic()
        assert now < deadline, f"timed out after {within_s:.0f} s of waiting until {what}"
        await asyncio.sleep(max(0.02, 3 * (now - began)))
        began = time.monotonic()


def described(result: ExecResult | ShellResult | CellResult) -> str:
    """Everything a model could read in a result."""
    if isinstance(result, ExecResult):
        return (result.stdout + result.stderr).decode(errors="replace") + result.limit
    return result.output + result.limit + (result.error if isinstance(result, CellResult) else "")


class PromiseTrial:
    """The context in which a promise is checked.

    `sandbox` is shared with other promises: do nothing to it that they would notice. `folder` is an empty folder of the
    node that all its users can read. `mark` is a unique number, so that a process `sleep MARK` can be found from
    outside.
    """

    def __init__(self, provider: SandboxProvider, sandbox: Sandbox, folder: Path, fields: dict[str, Any]) -> None:
        self.provider = provider
        self.sandbox = sandbox
        self.folder = folder
        self.mark = f"7{secrets.randbelow(10**9):09d}"
        self._fields = fields
        self._started: list[Sandbox] = []
        self._opened: list[Shell | Kernel] = []

    def spec(self, **fields: Any) -> SandboxSpec:
        """Return a spec with the image under test."""
        return SandboxSpec(**{**self._fields, **fields})

    def new_id(self) -> str:
        return f"promise-{self.mark}-{secrets.token_hex(3)}"

    async def start(self, **fields: Any) -> Sandbox:
        """Start a new sandbox with these fields of its spec; it is stopped when the promise ends."""
        return await self.start_as(self.new_id(), **fields)

    async def start_as(self, sandbox_id: str, **fields: Any) -> Sandbox:
        """Start a sandbox like `start`, with a given id."""
        sandbox = await self.provider.start(sandbox_id, self.spec(**fields))
        self._started.append(sandbox)
        return sandbox

    async def shell(self, on: Sandbox | None = None) -> Shell:
        """Open a shell in the shared sandbox or another; it is closed when the promise ends."""
        shell = await (on or self.sandbox).open_shell()
        self._opened.append(shell)
        return shell

    async def kernel(self, on: Sandbox | None = None) -> Kernel:
        """Open a kernel in the shared sandbox or another; it is closed when the promise ends."""
        kernel = await (on or self.sandbox).open_kernel()
        self._opened.append(kernel)
        return kernel

    def sleepers(self) -> list[int]:
        """Return the node's processes `sleep MARK`, including those inside sandboxes."""
        return outside.processes_with(f"sleep\0{self.mark}")

    async def until_asleep(self, n: int = 1) -> None:
        """Wait until `n` of them run. NotTried if the node cannot see them, e.g. in a virtual machine."""
        try:
            await until(lambda: len(self.sleepers()) >= n, f"{n} processes ran")
        except AssertionError:
            if self.sleepers():
                raise
            raise NotTried("the node does not see the processes of this kind of sandbox") from None

    async def close(self) -> None:
        """Close and stop everything that was opened and started."""
        await asyncio.gather(*(opened.close() for opened in self._opened))
        await asyncio.gather(*(sandbox.stop() for sandbox in self._started))

    async def bash(self, script: str, on: Sandbox | None = None, timeout_s: float = 20.0, **more: Any) -> ExecResult:
        """Run a script in the shared sandbox or another, and return its result."""
        return await (on or self.sandbox).exec(["bash", "-c", script], timeout_s=timeout_s, **more)

    async def sh(self, script: str, on: Sandbox | None = None, timeout_s: float = 20.0) -> str:
        """Return the output of a script, which must succeed and write no errors."""
        return _clean(await self.bash(script, on, timeout_s), script)

    async def python(self, code: str, *arguments: str, on: Sandbox | None = None, timeout_s: float = 20.0) -> str:
        """Return the output of a Python program, which must succeed and write no errors."""
        argv = ["python3", "-I", "-c", code, *arguments]
        return _clean(await (on or self.sandbox).exec(argv, timeout_s=timeout_s), code)


def program(name: str) -> str:
    """Return the source of one of the programs that run inside."""
    return files("workers.conformance.programs").joinpath(f"{name}.py").read_text()


def _clean(result: ExecResult, script: str) -> str:
    clean = result.code == 0 and not result.stderr
    assert clean, f"`{short(script.strip())}` should succeed, and ended with {result.code}: {short(described(result))}"
    return result.stdout.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Promise:
    """`group` is the module that defines it; `statement` is its docstring; `needs` are programs of the image.

    `surface` marks promises that authors of handlers and tools rely on, and that a fake keeps, too.
    """

    name: str
    group: str
    statement: str
    check: Check
    needs: tuple[str, ...] = ()
    surface: bool = False
    time_s: float = TIME_S


def promise(*needs: str, surface: bool = False, time_s: float = TIME_S) -> Callable[[Check], Promise]:
    """Turn a coroutine function with a PromiseTrial parameter into a promise; its docstring is the public statement."""

    def make(check: Check) -> Promise:
        group = check.__module__.rpartition(".")[2]
        statement = " ".join((inspect.getdoc(check) or "").split())
        if not statement:
            raise TypeError(f"{check.__name__} has no docstring: write its promise there")
        return Promise(check.__name__, group, statement, check, needs, surface, time_s)

    return make


@asynccontextmanager
async def elsewhere(trial: PromiseTrial, what: str, sandbox_id: str, **fields: object) -> AsyncIterator[Process]:
    """Run a function of `other_worker` until it ends or the block does."""
    kind = type(trial.provider)
    words = [f"{kind.__module__}:{kind.__qualname__}", sandbox_id, trial.spec(**fields).model_dump_json(), trial.mark]
    # a plug-in may be importable only through this process's path
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "workers.conformance.other_worker", what, *words),
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()
