"""A handler, an agent and an evaluator that misbehave as their instance asks, and their installation in a farm."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from farm.errors import EngineError, SandboxError, StoreUnavailable
from farm.records.request import SandboxLimits, SandboxSpec
from farm.records.rollout import Outcome
from farm.records.trajectory import Message
from workers.plugins.handler import Handler
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
from workers.sandboxes.sandbox import NodeSandbox
from workers.testing.plugin_path import python_path

ROOT = Path(__file__).parents[2]
SPEC = SandboxSpec(limits=SandboxLimits(memory_mb=200, disk_mb=20))
SPECS = {
    "host": SPEC,
    "unstartable": SPEC.model_copy(update={"workdir": "relative"}),
    "imageless": SPEC.model_copy(update={"image": "/there/is/none"}),
}


def installed_in(folder: Path) -> dict[str, str]:
    """Return the environment of a farm for which these are installed."""
    site = folder / "site"
    (site / "unruly-1.dist-info").mkdir(parents=True)
    (site / "unruly-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: unruly\nVersion: 1\n")
    (site / "unruly-1.dist-info/entry_points.txt").write_text(
        "[farm.handlers]\n"
        "unruly = tests.services.unruly:UnrulyHandler\n"
        "working = tests.services.unruly:WorkingHandler\n"
        "[farm.agents]\n"
        "unruly = tests.services.unruly:UnrulyAgent\n"
    )
    return {"PYTHONPATH": python_path(site, ROOT)}


class UnrulyInstance(BaseModel):
    """`fault` is what breaks, such as `collect:raise`; `where` names one of SPECS, or nothing.

    With `nodes`, the fault strikes only on these nodes; with `times`, so many times in all: each strike leaves a file
    in the folder `marks`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    fault: str = ""
    where: str = ""
    nodes: tuple[str, ...] = ()
    times: int = 0
    marks: str = ""
    seconds: float = Field(default=0.0, ge=0)
    packages: tuple[str, ...] = ()

    def strikes(self, fault: str) -> bool:
        if self.fault != fault or (self.nodes and os.environ["FARM_NODE"] not in self.nodes):
            return False
        if not self.times:
            return True
        struck = len(list(Path(self.marks).iterdir()))
        if struck >= self.times:
            return False
        Path(self.marks, f"{struck}").touch()
        return True

    def raise_in(self, place: str) -> None:
        if self.strikes(f"{place}:raise"):
            raise RuntimeError(f"the instance asks for it in {place}")
        where, _, kind = self.fault.partition(":")
        if where == place and kind in _RAISES and self.strikes(self.fault):
            _RAISES[kind]()


class _Unspeakable(Exception):
    """Cannot be converted to text."""

    def __str__(self) -> str:
        raise SystemExit("in __str__")

    __repr__ = __str__


class OwnKind(SandboxError):
    """Of a kind unknown to the farm."""

    kind = "own"


class UnspeakableKind(EngineError):
    """Cannot be converted to text either."""

    def __str__(self) -> str:
        raise RuntimeError("in __str__")


class OwnBaseException(BaseException):
    """An unexpected kind of error."""


def _raising(error: Callable[[], BaseException]) -> Callable[[], None]:
    def strike() -> None:
        raise error()

    return strike


def _recurse() -> None:
    _recurse()


def _close_loop() -> None:
    asyncio.get_running_loop().close()


def _cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


def _allocate() -> None:
    bytearray(2**60)


def _handle_signals() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


_RAISES: dict[str, Callable[[], Any]] = {
    "exit": sys.exit,
    "exit with text": partial(sys.exit, "enough"),
    "interrupt": _raising(KeyboardInterrupt),
    "generator exit": _raising(GeneratorExit),
    "base": _raising(partial(OwnBaseException, "of its own")),
    "cancelled": _raising(asyncio.CancelledError),
    "stop": _raising(partial(StopIteration, 1)),
    "stop async": _raising(StopAsyncIteration),
    "unspeakable": _raising(_Unspeakable),
    "group": _raising(lambda: ExceptionGroup("two", [ValueError("one"), ExceptionGroup("more", [KeyError("two")])])),
    "base group": _raising(lambda: BaseExceptionGroup("two", [SystemExit(3), KeyboardInterrupt()])),
    "recursion": _recurse,
    "memory": _allocate,
    "long": _raising(lambda: ValueError("x" * 5_000_000)),
    "unfit": _raising(lambda: ValueError("a\0b\ud800c")),
    "close loop": _close_loop,
    "signal handler": _handle_signals,
    "descriptor": _raising(lambda: OSError(9, "Bad file descriptor")),
    "import": lambda: importlib.import_module("there.is.none"),
    "syntax": partial(exec, "a b"),
    "farm's own": _raising(lambda: StoreUnavailable("it says so")),
    "timeout": _raising(TimeoutError),
    "own kind": _raising(partial(OwnKind, "of its own kind")),
    "unspeakable kind": _raising(UnspeakableKind),
}
RAISES = tuple(_RAISES)


class UnrulyHandler(Handler[UnrulyInstance]):
    """Fails in each of its methods, and hangs in one."""

    data_source: ClassVar[str] = "unruly"
    instance_type: ClassVar[type[BaseModel]] = UnrulyInstance
    agent: ClassVar[str] = "unruly"

    def sandbox(self) -> SandboxSpec | None:
        self.instance.raise_in("sandbox")
        if self.instance.strikes("node:sick"):
            raise SandboxError("no space is left on this node")
        spec = SPECS.get(self.instance.where)
        return spec and spec.model_copy(update={"packages": self.instance.packages})

    def messages(self) -> list[Message]:
        self.instance.raise_in("messages")
        return [{"role": "user", "content": self.instance.model_dump_json()}]

    async def prepare(self, sandbox: Sandbox) -> None:
        self.instance.raise_in("prepare")
        if self.instance.strikes("prepare:leave"):
            asyncio.get_running_loop().call_soon(sys.exit)
        if self.instance.fault == "prepare:hang":
            await asyncio.Event().wait()

    async def collect(self, sandbox: Sandbox | None, answer: str | None) -> Submission:
        self.instance.raise_in("collect")
        if self.instance.fault == "collect:hang":
            await asyncio.Event().wait()
        if self.instance.fault in _SUBMISSIONS:
            return _SUBMISSIONS[self.instance.fault]()  # type: ignore[no-any-return]
        if sandbox is not None:
            await sandbox.exec(["true"], timeout_s=5.0)
        return Submission(answer=answer)

    def evaluator(self, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        self.instance.raise_in("evaluator")
        return UnrulyEvaluator(self.instance)


def _cycle() -> dict[str, Any]:
    cycle: dict[str, Any] = {}
    cycle["again"] = [cycle]
    return cycle


def _deep() -> list[Any]:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


def _bomb() -> list[Any]:
    bomb: list[Any] = ["x"]
    for _ in range(50):
        bomb = [bomb, bomb]
    return bomb


DETAILS: dict[str, Callable[[], Any]] = {
    "object": lambda: {"what": object()},
    "cycle": _cycle,
    "deep": lambda: {"deep": _deep()},
    "bomb": lambda: {"bomb": _bomb()},
    "tuple key": lambda: {("a", 1): 1},
    "large": lambda: {"n": 2**70},
    "bytes": lambda: {"b": b"x"},
    "huge": lambda: {"text": "x" * 100_000_000},
    "set": lambda: {"s": {1, 2}},
    "list": lambda: ["no", "dict"],
    "proxy": lambda: {"p": MappingProxyType({})},
    "number of numpy": lambda: {"n": np.int64(3)},
}
"""Details of a score that no store can hold."""
FIT_DETAILS: dict[str, Any] = {
    "nul": "a\0b",
    "half": "\ud800",
    "nan": math.nan,
    "tuple": (1, 2),
    "keys": {1: 2, None: 3},
}
"""Details that look bad but are accepted: the policy wrote them, not the evaluator."""
_SUBMISSIONS: dict[str, Callable[[], Any]] = {
    "collect:none": lambda: None,
    "collect:dict": lambda: {"answer": "1"},
    "collect:bytes": lambda: Submission.model_construct(answer=b"1", files={}),
    "collect:files": lambda: Submission.model_construct(answer="1", files={"a": b"1"}),
    "collect:keys": lambda: Submission.model_construct(answer="1", files={("a",): "1"}),
    "collect:huge": lambda: Submission(answer="x" * 100_000_000),
    "collect:texts": lambda: Submission(answer="a\0b\ud800", files={"\ud800\0": "\0"}),
}


_SCORES: dict[str, Any] = {
    "evaluate:nan": math.nan,
    "evaluate:infinite": math.inf,
    "evaluate:text": "1.0",
    "evaluate:none": None,
    "evaluate:complex": 1j,
}


class UnrulyEvaluator:
    """Returns 1, or a value that is no score."""

    name: ClassVar[str] = "unruly"

    def __init__(self, instance: UnrulyInstance) -> None:
        self._instance = instance

    async def evaluate(self, submission: Submission, fresh: FreshSandbox, timeout_s: float) -> Score:
        self._instance.raise_in("evaluate")
        if self._instance.fault == "evaluate:hang":
            await asyncio.Event().wait()
        if self._instance.fault == "evaluate:hang and break":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise RuntimeError("it was disturbed") from None
        kind, _, details = self._instance.fault.partition(":")
        if kind == "details":
            return Score(1.0, FIT_DETAILS if details == "fit" else DETAILS[details]())
        if self._instance.fault == "evaluate:no score":
            return 1.0  # type: ignore[return-value]
        return Score(_SCORES.get(self._instance.fault, 1.0))


class UnrulyAgent:
    """Ends normally, or as the instance asks."""

    async def run(self, context: AgentContext) -> AgentResult:
        instance = UnrulyInstance.model_validate_json(str(context.messages[0]["content"]))
        fault = instance.fault
        instance.raise_in("agent")
        if fault == "agent:cancel itself":
            _cancel_itself()
            await asyncio.sleep(0)
        if fault == "agent:task exits":
            asyncio.create_task(_exit())  # noqa: RUF006 - on purpose without a reference
        if fault == "agent:callback exits":
            asyncio.get_running_loop().call_soon(sys.exit)
        if fault == "agent:stop loop":
            asyncio.get_running_loop().stop()
        if fault == "agent:callback blocks":
            asyncio.get_running_loop().call_soon(time.sleep, 300.0)
            await asyncio.sleep(300.0)
        if fault == "agent:loop blocks":
            # a separate thread has no rollout in its context
            block = partial(asyncio.get_running_loop().call_soon_threadsafe, time.sleep, 300.0)
            threading.Thread(target=block, daemon=True).start()
            await asyncio.sleep(300.0)
        if fault == "agent:thread exits":
            await asyncio.to_thread(sys.exit)
        if fault == "agent:tasks break":
            async with asyncio.TaskGroup() as group:
                group.create_task(_break_engine())
        if fault == "agent:answer bytes":
            return AgentResult(Outcome.SUBMITTED, b"1")  # type: ignore[arg-type]
        if instance.strikes("agent:quit process"):
            os._exit(0)
        if instance.strikes("agent:crash process"):
            ctypes.string_at(0)
        if fault == "agent:stubborn":
            await _swallow_cancellations(2)
        if fault == "agent:outcome":
            return AgentResult(Outcome.LOST, "1")
        if fault == "agent:none":
            return None  # type: ignore[return-value]
        if instance.strikes("agent:die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault in {"sandbox:killed", "sandbox:killed late"}:
            assert isinstance(context.sandbox, NodeSandbox)
            # its init: the kernel kills the rest
            os.kill(context.sandbox._record.first.pid, signal.SIGKILL)
        if fault == "sandbox:killed":
            assert context.sandbox is not None
            await context.sandbox.exec(["true"], timeout_s=5.0)
        await asyncio.sleep(instance.seconds)
        return AgentResult(Outcome.SUBMITTED, "1")


async def _exit() -> None:
    sys.exit(4)


async def _break_engine() -> None:
    raise EngineError("an engine broke in a branch")


async def _swallow_cancellations(n: int) -> None:
    for _ in range(n):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


class WorkingInstance(BaseModel):
    """`read_request` selects a branch of the scripted engine's script."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    question: str


class WorkingHandler(Handler[WorkingInstance]):
    """A policy with a shell in a small sandbox; whatever it submits is worth 1."""

    data_source: ClassVar[str] = "working"
    instance_type: ClassVar[type[BaseModel]] = WorkingInstance
    tools: ClassVar[Collection[str]] = ("bash", "submit")

    def sandbox(self) -> SandboxSpec | None:
        return SPEC

    def messages(self) -> list[Message]:
        return [{"role": "user", "content": self.instance.question}]

    async def collect(self, sandbox: Sandbox | None, answer: str | None) -> Submission:
        assert sandbox is not None
        await sandbox.exec(["true"], timeout_s=5.0)
        return Submission(answer=answer)

    def evaluator(self, models: Mapping[str, ChatModel] = NO_MODELS) -> Evaluator:
        return UnrulyEvaluator(UnrulyInstance())
