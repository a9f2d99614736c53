"""One borrowed sandbox while its worker holds it: its shells, tools and running calls.

A call continues if its caller disconnects, up to its time limit. A repetition with the same id joins it, or gets the
remembered result if it has ended. So a caller whose API process was killed gets the result, and nothing is done twice.
"""

from __future__ import annotations

import asyncio
import io
import tempfile
import time
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from farm import task_archive
from farm.errors import (
    Conflict,
    HandlerError,
    InvalidRequest,
    NotFound,
    Overloaded,
    SandboxEnded,
    SandboxError,
    ToolError,
)
from farm.plugins import follows
from farm.records.lending.sandbox_calls import (
    MAX_FILE_BYTES,
    CloseShellCall,
    CommandResult,
    Done,
    ExecCall,
    FileContent,
    FileList,
    ForgetCall,
    ListFilesCall,
    ListProcessesCall,
    MakeFolderCall,
    MoveFileCall,
    OpenShellCall,
    ReadCall,
    RemoveFileCall,
    ResizeProcessCall,
    SandboxToolCall,
    ShellCall,
    ShellOutput,
    SignalProcessCall,
    StartProcessCall,
    ToolResult,
    WatchProcessCall,
    WriteCall,
    WriteProcessCall,
)
from farm.records.request_values import Request
from workers.config import SandboxConfig
from workers.lending.lent_process import ProcessTable
from workers.lending.lent_shell import LentShell
from workers.plugins import registry
from workers.plugins.interfaces import Observation, Sandbox, Tool
from workers.plugins.plugin_faults import fault_of
from workers.sandboxes.optional_protocols import ManagesFiles
from workers.stages.node_shortage import NodeHealth, healthy_node

T = TypeVar("T")

MAX_CALLS = 64
"""Maximum number of running calls of one sandbox; more are refused."""
MAX_WATCHES = 256
"""Maximum number of calls that wait for the output of processes, which are counted separately."""
MAX_SHELLS = 64
_SLACK_S = 30.0
"""Seconds after its own limit at which a call is given up."""
_STARTS_S = 60.0
_CLOSE_S = 10.0

MAX_REMEMBERED = 128
MAX_BYTES = 32_000_000
"""Maximum size of the remembered results. The last one is remembered however large it is."""


class LentSandbox:
    """Answers calls on the event loop. `used_at` is when the last call began or ended, by the monotonic clock.

    `lost_state` is True for a sandbox that another worker held before, with its shells and tools.
    """

    def __init__(
        self, config: SandboxConfig, sandbox: Sandbox, token: str, lease_s: float, lost_state: bool = False
    ) -> None:
        self._config = config
        self.sandbox = sandbox
        self.lost_state = lost_state
        self.token = token
        self.lease_s = lease_s
        self.used_at = time.monotonic()
        self._closed = False
        self._shells: dict[str, _Turn[LentShell]] = {}
        self._tools: dict[str, _Turn[Tool]] = {}
        self._processes = ProcessTable(sandbox)
        self._calls = CallMemory()
        self._running: set[asyncio.Task[Any]] = set()
        self._watching: set[asyncio.Task[Any]] = set()
        self._verbs: Mapping[type[Request], Callable[[Any], Coroutine[Any, Any, Any]]] = {
            ExecCall: self._exec,
            ShellCall: self._shell,
            OpenShellCall: self._open_shell,
            CloseShellCall: self._close_shell,
            ReadCall: self._read,
            WriteCall: self._write,
            ListFilesCall: self._list_files,
            MoveFileCall: self._move_file,
            RemoveFileCall: self._remove_file,
            MakeFolderCall: self._make_folder,
            SandboxToolCall: self._tool,
            StartProcessCall: self._processes.start,
            WatchProcessCall: self._processes.watch,
            WriteProcessCall: self._processes.write,
            SignalProcessCall: self._processes.signal,
            ResizeProcessCall: self._processes.resize,
            ListProcessesCall: self._processes.list,
            ForgetCall: self._forget,
        }

    @property
    def in_use(self) -> bool:
        return bool(self._running)

    @property
    def broken(self) -> bool:
        """True if its first process has ended; all of it ends with that."""
        return not getattr(self.sandbox, "alive", lambda: True)()

    async def answer(self, call: Request, call_id: str) -> Any:
        """Return the result of a call. `call_id` is empty for a call that is never repeated.

        Raises UsageError for errors of the caller, SandboxError for a broken sandbox, Overloaded.
        """
        if self._closed:
            raise self._ended()
        if isinstance(call, ReadCall | WatchProcessCall):
            # it changes nothing, so it may be done twice, and its result may be too large to be remembered
            call_id = ""
        task = self._calls.get(call_id) if call_id else None
        if task is None:
            self._check_room(call)
            task = asyncio.create_task(self._answered(call))
            self._running.add(task)
            if isinstance(call, WatchProcessCall):
                self._watching.add(task)
            task.add_done_callback(self._note_end)
            if call_id:
                self._calls.add(call_id, task)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._closed:
                raise self._ended() from None
            raise

    def _check_room(self, call: Request) -> None:
        """Raise Overloaded if too many calls are running. Watching calls leave room for others."""
        watches = isinstance(call, WatchProcessCall)
        n_calls = len(self._watching) if watches else len(self._running) - len(self._watching)
        most = MAX_WATCHES if watches else MAX_CALLS
        if n_calls >= most:
            raise Overloaded(f"sandbox {self.sandbox.sandbox_id}: {most} calls are running: wait for one")

    def _ended(self) -> SandboxEnded:
        return SandboxEnded(f"sandbox {self.sandbox.sandbox_id} has ended")

    async def _forget(self, call: ForgetCall) -> Done:
        self._calls.forget(call.call_ids)
        return Done()

    def _note_end(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        self._watching.discard(task)
        self.used_at = time.monotonic()
        if not task.cancelled():
            # its caller may have disconnected
            task.exception()

    async def _answered(self, call: Request) -> Any:
        self.used_at = time.monotonic()
        name, what = self.sandbox.sandbox_id, f"the call {type(call).__name__}"
        limit_s = getattr(call, "timeout_s", _STARTS_S) + _SLACK_S
        try:
            async with healthy_node(self._config, name, what, SandboxError) as node, asyncio.timeout(limit_s):
                return await self._carried_out(call, node)
        except TimeoutError:
            raise SandboxError(f"{name}: {what} did not end within {limit_s:g} s") from None

    async def _carried_out(self, call: Request, node: NodeHealth) -> Any:
        node.use(self.sandbox)
        try:
            return await self._verbs[type(call)](call)
        except (InvalidRequest, NotFound, Conflict, Overloaded):
            raise
        except ToolError as error:
            raise InvalidRequest(str(error)) from None
        except Exception as error:
            raise fault_of(error, self.sandbox.sandbox_id, f"the call {type(call).__name__}", SandboxError) from error

    async def _exec(self, call: ExecCall) -> CommandResult:
        result = await self.sandbox.exec(
            call.argv, timeout_s=call.timeout_s, stdin=b64decode(call.stdin), env=call.env, cwd=call.cwd
        )
        out, err = (data.decode(errors="replace") for data in (result.stdout, result.stderr))
        return CommandResult(result.code, out, err, result.timed_out, result.limit)

    async def _shell(self, call: ShellCall) -> ShellOutput:
        if call.keys is not None and call.command:
            raise InvalidRequest("give a command or keys, not both", field="keys")
        if call.expect is not None and call.keys is None and not call.interactive:
            raise InvalidRequest("goes with keys or an interactive command", field="expect")
        turn = self._shells.get(call.session)
        if turn is None:
            if not call.opens or call.keys is not None:
                raise NotFound(f"sandbox {self.sandbox.sandbox_id} has no shell {call.session!r:.200}")
            turn = self._new_shell(call.session)
        async with turn.lock:
            turn.value = turn.value or LentShell(await self.sandbox.open_shell())
            return await turn.value.answer(call)

    def _new_shell(self, name: str) -> _Turn[LentShell]:
        if len(self._shells) >= MAX_SHELLS:
            raise Overloaded(f"sandbox {self.sandbox.sandbox_id} has {MAX_SHELLS} shells: close one first")
        return self._shells.setdefault(name, _Turn())

    async def _open_shell(self, call: OpenShellCall) -> ShellOutput:
        if call.session in self._shells:
            raise Conflict(f"sandbox {self.sandbox.sandbox_id} has a shell {call.session!r:.200} already")
        turn = self._new_shell(call.session)
        try:
            async with turn.lock:
                turn.value = LentShell(await self.sandbox.open_shell())
                shown = await turn.value.answer(ShellCall(session=call.session, timeout_s=_STARTS_S))
            if self._shells.get(call.session) is not turn:
                raise NotFound(f"shell {call.session!r:.200} was closed while it was being opened")
            return shown
        except BaseException:
            if self._shells.get(call.session) is turn:
                del self._shells[call.session]
            if turn.value is not None:
                await turn.value.close()
            raise

    async def _close_shell(self, call: CloseShellCall) -> Done:
        turn = self._shells.pop(call.session, None)
        if turn is None:
            raise NotFound(f"sandbox {self.sandbox.sandbox_id} has no shell {call.session!r:.200}")
        # whatever runs there: closing ends it
        if turn.value is not None:
            await turn.value.close()
        return Done()

    async def _read(self, call: ReadCall) -> FileContent:
        data = await (self._packed(call.path) if call.packed else self.sandbox.read_file(call.path))
        if len(data) > MAX_FILE_BYTES:
            raise InvalidRequest(f"{call.path} has more than {MAX_FILE_BYTES} bytes: read it in parts", field="path")
        return FileContent.of(data)

    async def _packed(self, path: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="farm-lent-") as folder:
            top = Path(folder) / "files"
            await self.sandbox.download(path, top)
            if not top.is_dir():
                raise InvalidRequest(f"{path} is not a folder: read it as a file", field="path")
            packed = io.BytesIO()
            await asyncio.to_thread(task_archive.pack, top, packed)
            return packed.getvalue()

    async def _write(self, call: WriteCall) -> Done:
        data = b64decode(call.data)
        if not call.packed:
            await self.sandbox.write_file(call.path, data)
            return Done()
        with tempfile.TemporaryDirectory(prefix="farm-lent-") as folder:
            top = Path(folder) / "files"
            await asyncio.to_thread(task_archive.unpack, io.BytesIO(data), top)
            await self.sandbox.upload(top, call.path)
        return Done()

    def _file_manager(self) -> ManagesFiles:
        if not follows(self.sandbox, ManagesFiles):
            raise InvalidRequest("is not for this kind of sandbox: use exec or shell", field="path")
        return self.sandbox

    async def _list_files(self, call: ListFilesCall) -> FileList:
        return FileList(tuple(await self._file_manager().list_files(call.path, call.depth)))

    async def _move_file(self, call: MoveFileCall) -> Done:
        await self._file_manager().move_file(call.path, call.target)
        return Done()

    async def _remove_file(self, call: RemoveFileCall) -> Done:
        await self._file_manager().remove_file(call.path)
        return Done()

    async def _make_folder(self, call: MakeFolderCall) -> Done:
        await self._file_manager().make_folder(call.path)
        return Done()

    async def _tool(self, call: SandboxToolCall) -> ToolResult:
        make = registry.tool(call.name)
        turn = self._tools.setdefault(call.name, _Turn())
        async with turn.lock:
            try:
                tool = turn.value = turn.value or make(self.sandbox)
            except HandlerError as off:
                raise InvalidRequest(str(off), field="name") from None
            try:
                arguments = tool.arguments.model_validate(call.arguments)
            except ValidationError as error:
                wrong = error.errors(include_url=False, include_input=False)
                texts = (".".join(map(str, ("arguments", *each["loc"]))) + ": " + each["msg"] for each in wrong)
                return ToolResult("; ".join(texts), refused=True)
            try:
                return _observed(await tool.call(arguments, call.timeout_s))
            except ToolError as refusal:
                return ToolResult(str(refusal), refused=True)

    async def close(self) -> None:
        """End its calls, and the sandbox itself with all processes."""
        self._closed = True
        for task in list(self._running):
            task.cancel()
        if self._running:
            await asyncio.wait(self._running, timeout=_CLOSE_S)
        await self.sandbox.stop()
        await self.leave()

    async def leave(self) -> None:
        """Release the descriptors and sessions of tools, shells and processes; the sandbox itself continues."""
        self._processes.close()
        held: list[Tool | LentShell | None] = [turn.value for turn in self._tools.values()]
        held += [turn.value for turn in self._shells.values()]
        for each in held:
            if each is None:
                continue
            try:
                async with asyncio.timeout(_CLOSE_S):
                    await each.close()
            except Exception as error:
                fault_of(error, self.sandbox.sandbox_id, "closing a tool", SandboxError)
        self._tools.clear()
        self._shells.clear()


class _Turn(Generic[T]):
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.value: T | None = None


def _observed(observation: Observation) -> ToolResult:
    artefacts = {each.name: [each.media_type, b64encode(each.data).decode()] for each in observation.artefacts}
    return ToolResult(observation.text, done=observation.done, answer=observation.answer, artefacts=artefacts)


class CallMemory:
    """Used on the event loop."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, asyncio.Task[Any]] = OrderedDict()

    def get(self, call_id: str) -> asyncio.Task[Any] | None:
        """Return the call with an id, None if there was none or it is forgotten."""
        return self._calls.get(call_id)

    def add(self, call_id: str, task: asyncio.Task[Any]) -> None:
        self._calls[call_id] = task
        task.add_done_callback(partial(self._note_end, call_id))

    def forget(self, call_ids: Iterable[str]) -> None:
        """Forget those of some calls that have ended."""
        for call_id in call_ids:
            if (task := self._calls.get(call_id)) is not None and task.done():
                del self._calls[call_id]

    def _note_end(self, call_id: str, task: asyncio.Task[Any]) -> None:
        if call_id not in self._calls:
            return
        self._calls.move_to_end(call_id)
        n_bytes = 0
        ended = [each for each in reversed(self._calls) if self._calls[each].done()]
        for index, each in enumerate(ended):
            n_bytes += _size(self._calls[each])
            if index >= MAX_REMEMBERED or (index and n_bytes > MAX_BYTES):
                del self._calls[each]


def _size(task: asyncio.Task[Any]) -> int:
    return 0 if task.cancelled() or task.exception() is not None else _characters(task.result())


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if is_dataclass(value) and not isinstance(value, type):
        return sum(_characters(getattr(value, each.name)) for each in fields(value))
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0
