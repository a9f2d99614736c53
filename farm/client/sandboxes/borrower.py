"""The verbs of borrowed sandboxes, and the handle of one sandbox."""

from __future__ import annotations

import io
import secrets
import tempfile
import time
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, cast

from farm import task_archive
from farm.client.request_checks import checked
from farm.errors import FarmError, Overloaded
from farm.records.lending.borrowed_sandbox import LEASE_S, BorrowedSandbox, BorrowRequest
from farm.records.lending.sandbox_calls import (
    CALL_S,
    CloseShellCall,
    CommandResult,
    ExecCall,
    FileContent,
    FileEntry,
    FileList,
    ListFilesCall,
    ListProcessesCall,
    MakeFolderCall,
    MoveFileCall,
    ProcessList,
    ProcessOutput,
    ProcessState,
    ReadCall,
    RemoveFileCall,
    ResizeProcessCall,
    SandboxToolCall,
    ShellCall,
    ShellOutput,
    SignalProcessCall,
    StartProcessCall,
    TerminalSize,
    ToolResult,
    WatchProcessCall,
    WriteCall,
    WriteProcessCall,
)
from farm.records.request_values import Request
from farm.records.sandbox_spec import SandboxSpec
from farm.records.task_needs import NetworkRule

ROOM_S = 300.0
_POLL_S = 10.0

_WATCH_S = 20.0
_SHORTEST_S = 0.001


class Borrower(ABC):
    """The verbs. A sandbox is referenced by its id, or by the name that its borrower gave."""

    def start(
        self,
        spec: SandboxSpec | Mapping[str, Any] | None = None,
        *,
        network: NetworkRule = "refuse",
        lease_s: float = LEASE_S,
        name: str = "",
        priority: int = 0,
        labels: Mapping[str, str] | None = None,
        wait_s: float = ROOM_S,
    ) -> LentHandle:
        """Borrow a sandbox and wait until it runs; an unfinished one with the same `name` is reused.

        It ends `lease_s` seconds after the last call. Raises InvalidRequest for a spec that cannot be met, SandboxEnded
        if it does not start, and Overloaded if there is no room within `wait_s` or too many are open; then none is
        left.
        """
        request = checked(
            BorrowRequest,
            {
                "spec": spec if spec is not None else SandboxSpec(),
                "network": network,
                "lease_s": lease_s,
                # a request that may be resent needs a name
                "name": name or f"start-{secrets.token_hex(16)}",
                "priority": priority,
                "labels": dict(labels or {}),
            },
        )
        deadline = time.monotonic() + wait_s
        state = self.begin(request)
        try:
            while state.pending:
                left_s = deadline - time.monotonic()
                if not left_s > 0:
                    raise Overloaded(f"no sandbox started in {wait_s:g} s (still {state.state}): try again later")
                state = self.watched(state.sandbox_id, min(left_s, _POLL_S, request.lease_s / 3))
                if not state.ended:
                    self.renew(state.sandbox_id)
        except BaseException:
            # also after an interrupt: nobody would use it
            with suppress(FarmError):
                self.stop(state.sandbox_id)
            raise
        if state.ended:
            raise state.ended_error()
        return LentHandle(self, state.sandbox_id)

    def attach(self, reference: str) -> LentHandle:
        """Return a sandbox that was borrowed before. Raises NotFound, SandboxEnded."""
        state = self.get(reference)
        if state.ended:
            raise state.ended_error()
        return LentHandle(self, state.sandbox_id)

    @abstractmethod
    def begin(self, request: BorrowRequest) -> BorrowedSandbox:
        """Request a sandbox without waiting for it. Raises InvalidRequest, Conflict, Overloaded."""

    @abstractmethod
    def watched(self, reference: str, wait_s: float) -> BorrowedSandbox:
        """Return a sandbox's state when it runs or has ended, at the latest after `wait_s`. Raises NotFound."""

    def get(self, reference: str) -> BorrowedSandbox:
        """Return a sandbox's current state. Raises NotFound."""
        return self.watched(reference, 0.0)

    @abstractmethod
    def list(self, limit: int = 100, ended: bool = False, before: str | None = None) -> Sequence[BorrowedSandbox]:
        """Return borrowed sandboxes, newest first; with `ended` also those that have ended.

        With `before`, a sandbox's id, those requested before it. At most 1,000 at a time. Raises NotFound.
        """

    @abstractmethod
    def renew(self, reference: str, lease_s: float | None = None) -> BorrowedSandbox:
        """Renew a lease, and set its length to `lease_s` if given. Raises NotFound, SandboxEnded."""

    @abstractmethod
    def stop(self, reference: str) -> BorrowedSandbox:
        """End a sandbox. Safe to repeat. Raises NotFound."""

    @abstractmethod
    def call(self, reference: str, call: Request) -> Any:
        """Return the result of a call, executed once. Raises InvalidRequest, NotFound, SandboxEnded."""


class LentHandle:
    """A borrowed sandbox; `with` stops it. Every call renews its lease, and raises SandboxEnded once it has ended."""

    def __init__(self, borrower: Borrower, sandbox_id: str) -> None:
        self.sandbox_id = sandbox_id
        self._borrower = borrower

    def exec(
        self,
        *argv: str,
        timeout_s: float = CALL_S,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> CommandResult:
        """Run one command to its end, or kill it after `timeout_s`."""
        values = {"argv": list(argv), "timeout_s": timeout_s, "stdin": b64encode(stdin).decode(), "env": env}
        return cast(CommandResult, self._call(ExecCall, values | {"cwd": cwd}))

    def shell(
        self, command: str, session: str = "default", *, timeout_s: float = CALL_S, interactive: bool = False
    ) -> ShellOutput:
        """Run a command in a persistent shell, which is opened on first use."""
        values = {"command": command, "session": session, "timeout_s": timeout_s, "interactive": interactive}
        return cast(ShellOutput, self._call(ShellCall, values))

    def keys(self, keys: str, session: str = "default", *, timeout_s: float = 5.0) -> ShellOutput:
        """Type keys to the interactive program in a shell; "" only waits for more output."""
        return cast(ShellOutput, self._call(ShellCall, {"keys": keys, "session": session, "timeout_s": timeout_s}))

    def close_shell(self, session: str = "default") -> None:
        """Close a shell and end its programs."""
        self._call(CloseShellCall, {"session": session})

    def tool(self, name: str, timeout_s: float = CALL_S, **arguments: Any) -> ToolResult:
        """Call one of the farm's tools, such as `bash` or `edit`, whose state persists between calls."""
        return cast(
            ToolResult, self._call(SandboxToolCall, {"name": name, "arguments": arguments, "timeout_s": timeout_s})
        )

    def python(self, code: str, timeout_s: float = CALL_S) -> ToolResult:
        """Run code in the sandbox's IPython, whose state persists between calls."""
        return self.tool("python", timeout_s, code=code)

    def read(self, path: str) -> bytes:
        """Return the contents of a file."""
        return cast(FileContent, self._call(ReadCall, {"path": path})).contents

    def write(self, path: str, data: bytes) -> None:
        """Write a file and create its folders."""
        self._call(WriteCall, {"path": path, "data": b64encode(data).decode()})

    def upload(self, source: str | Path, path: str) -> None:
        """Copy a local file or folder into the sandbox, as `path`."""
        if Path(source).is_dir():
            packed = io.BytesIO()
            task_archive.pack(Path(source), packed)
            self._call(WriteCall, {"path": path, "data": b64encode(packed.getvalue()).decode(), "packed": True})
        else:
            self.write(path, Path(source).read_bytes())

    def download(self, path: str, target: str | Path) -> None:
        """Copy a folder of the sandbox to the local path `target`, which must not exist."""
        data = cast(FileContent, self._call(ReadCall, {"path": path, "packed": True})).contents
        with tempfile.SpooledTemporaryFile() as archive:
            archive.write(data)
            archive.seek(0)
            task_archive.unpack(cast(Any, archive), Path(target))

    def list_files(self, path: str, depth: int = 1) -> Sequence[FileEntry]:
        """Return the files of a folder down to a depth; with depth 0, the file or folder itself."""
        return cast(FileList, self._call(ListFilesCall, {"path": path, "depth": depth})).files

    def move_file(self, path: str, target: str) -> None:
        """Move a file or a folder; creates the parent folders of the new path."""
        self._call(MoveFileCall, {"path": path, "target": target})

    def remove_file(self, path: str) -> None:
        """Remove a file, or a folder with its contents."""
        self._call(RemoveFileCall, {"path": path})

    def make_folder(self, path: str) -> None:
        """Make a new folder and its parents."""
        self._call(MakeFolderCall, {"path": path})

    def start_process(
        self,
        *argv: str,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bool = False,
        terminal: TerminalSize | None = None,
        limit_s: float | None = None,
        label: str = "",
    ) -> RunningProcess:
        """Start a background program, optionally with a writable input or a terminal."""
        values = {"argv": list(argv), "env": env, "cwd": cwd, "stdin": stdin, "terminal": terminal}
        started = self._call(StartProcessCall, values | {"limit_s": limit_s, "label": label})
        return RunningProcess(self._borrower, self.sandbox_id, started.process_id, started.pid)

    def processes(self) -> Sequence[ProcessState]:
        """Return the started processes that still run."""
        return cast(ProcessList, self._call(ListProcessesCall, {})).processes

    def renew(self, lease_s: float | None = None) -> BorrowedSandbox:
        """Renew the lease without a call."""
        return self._borrower.renew(self.sandbox_id, lease_s)

    def state(self) -> BorrowedSandbox:
        """Return the sandbox's state."""
        return self._borrower.get(self.sandbox_id)

    def stop(self) -> None:
        """End the sandbox. Safe to repeat."""
        self._borrower.stop(self.sandbox_id)

    def _call(self, kind: type[Request], values: Mapping[str, Any]) -> Any:
        return self._borrower.call(self.sandbox_id, checked(kind, values))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()


@dataclass(frozen=True, slots=True)
class WrittenBytes:
    """Bytes that a process wrote to `stdout`, `stderr` or its `terminal`."""

    stream: Literal["stdout", "stderr", "terminal"]
    data: bytes


class RunningProcess:
    """A background process; it runs on if this object is dropped. Of unread output the last million bytes are kept."""

    def __init__(self, borrower: Borrower, sandbox_id: str, process_id: str, pid: int) -> None:
        self.process_id = process_id
        self.pid = pid
        self._borrower = borrower
        self._sandbox_id = sandbox_id
        self._after = 0
        self._end: ProcessOutput | None = None

    def output(self) -> Iterator[WrittenBytes]:
        """Yield output as it is written, to the end of the process; continues where an earlier iterator stopped."""
        while self._end is None:
            yield from self._watched(_WATCH_S)

    def wait(self, timeout_s: float | None = None) -> ProcessOutput:
        """Wait for the end of the process and return it; skips output. Raises TimeoutError."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._end is None:
            left_s = _WATCH_S if deadline is None else min(_WATCH_S, deadline - time.monotonic())
            if left_s <= 0:
                raise TimeoutError(f"process {self.pid} of sandbox {self._sandbox_id} runs on after {timeout_s:g} s")
            for _ in self._watched(max(left_s, _SHORTEST_S)):
                pass
        return self._end

    def _watched(self, wait_s: float) -> Iterator[WrittenBytes]:
        call = WatchProcessCall(process=self.process_id, after=self._after, timeout_s=wait_s)
        shown: ProcessOutput = self._borrower.call(self._sandbox_id, call)
        self._after = shown.next
        if shown.ended:
            self._end = shown
        for piece in shown.pieces:
            yield WrittenBytes(cast(Literal["stdout", "stderr", "terminal"], piece.stream), b64decode(piece.data))

    def write(self, data: bytes, close: bool = False) -> None:
        """Write to its input; `close` closes the input afterwards. Raises Conflict if it has no open input."""
        values = {"process": self.process_id, "data": b64encode(data).decode(), "close": close}
        self._borrower.call(self._sandbox_id, checked(WriteProcessCall, values))

    def signal(self, name: str) -> None:
        """Send a signal by name, such as `INT`; `KILL` also ends all processes that it started."""
        self._borrower.call(self._sandbox_id, checked(SignalProcessCall, {"process": self.process_id, "signal": name}))

    def resize(self, rows: int, columns: int) -> None:
        """Set the size of its terminal."""
        size = checked(TerminalSize, {"rows": rows, "columns": columns})
        self._borrower.call(self._sandbox_id, ResizeProcessCall(process=self.process_id, terminal=size))
