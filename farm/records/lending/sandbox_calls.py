"""Calls to a borrowed sandbox and their results, in the same form from client to API and from API to node.

Bytes are sent in base64; in output shown as text, undecodable bytes are replaced.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from farm.records.request_values import Json, Name, Request
from farm.records.values import size_of

MAX_CALL_S = 3600.0
CALL_S = 120.0
MAX_FILE_BYTES = 64_000_000
"""Limit of a file, or of an archive of files, per call."""
_MAX_BASE64 = MAX_FILE_BYTES * 4 // 3 + 4
_MAX_TEXT = 2_000_000


def _some_text(text: str) -> str:
    size_of(text, _MAX_TEXT)
    return text


def _is_base64(text: str) -> str:
    b64decode(text, validate=True)
    return text


Text = Annotated[str, AfterValidator(_some_text)]
"""Text of up to 2 MB that the store accepts."""
AS_BASE64: dict[str, Any] = {
    "contentEncoding": "base64",
    "pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
}
"""The type of base64 bytes in the API's description."""
Base64 = Annotated[str, Field(max_length=_MAX_BASE64, json_schema_extra=AS_BASE64), AfterValidator(_is_base64)]
CallSeconds = Annotated[float, Field(gt=0, le=MAX_CALL_S)]
FilePath = Annotated[Name, Field(min_length=1, max_length=4096)]
_CallId = Annotated[Name, Field(min_length=1, max_length=200)]
SessionName = Annotated[Name, Field(min_length=1, max_length=200)]
ExpectedText = Annotated[Text, Field(min_length=1, max_length=1000)]
MAX_EXPECTED = 64
"""Texts that one call may wait for."""
ProcessName = Annotated[Name, Field(min_length=1, max_length=200)]
"""The id of a process; for a running one also its pid or label."""


class ExecCall(Request):
    """Run one command, given as its words, to its end."""

    argv: Annotated[list[Text], Field(min_length=1, max_length=10_000)]
    timeout_s: CallSeconds = CALL_S
    stdin: Base64 = ""
    env: dict[Name, Text] | None = None
    cwd: FilePath | None = None


class ShellCall(Request):
    """Run a command in a persistent shell, or type keys to the program that has its terminal.

    `session` names the shell; its first command opens it if `opens`. With `interactive` the call returns as soon as the
    program waits for input; `keys` continues it. With `expect` it returns once the program has written one of these
    texts, or has ended.
    """

    command: Text = ""
    keys: Text | None = None
    session: SessionName = "default"
    timeout_s: CallSeconds = CALL_S
    interactive: bool = False
    opens: bool = True
    expect: Annotated[list[ExpectedText], Field(max_length=MAX_EXPECTED)] | None = None


class OpenShellCall(Request):
    """Open a new shell with an unused name."""

    session: SessionName = "default"


class CloseShellCall(Request):
    session: SessionName = "default"


class ReadCall(Request):
    """Read a file; with `packed`, a folder as a tar."""

    path: FilePath
    packed: bool = False


class WriteCall(Request):
    """Write a file; with `packed`, a folder from a tar. Creates parent folders."""

    path: FilePath
    data: Base64
    packed: bool = False


class ListFilesCall(Request):
    """List the files of a folder down to a `depth`; with depth 0, the file or folder itself."""

    path: FilePath
    depth: Annotated[int, Field(ge=0, le=100)] = 1


class MoveFileCall(Request):
    """Move a file or folder to a new path. Creates parent folders."""

    path: FilePath
    target: FilePath


class RemoveFileCall(Request):
    """Remove a file, or a folder with its contents."""

    path: FilePath


class MakeFolderCall(Request):
    """Make a new folder and its parents."""

    path: FilePath


class SandboxToolCall(Request):
    """Call one of the farm's tools; its state, such as the interpreter of `python`, persists between calls."""

    name: Annotated[Name, Field(max_length=64)]
    arguments: Json = Field(default_factory=dict)
    timeout_s: CallSeconds = CALL_S


class ForgetCall(Request):
    """Forget the results of calls that their caller has received: from now on the same ids are new calls."""

    call_ids: Annotated[list[_CallId], Field(max_length=1000)]


class TerminalSize(Request):
    rows: Annotated[int, Field(ge=1, le=10_000)] = 50
    columns: Annotated[int, Field(ge=1, le=10_000)] = 200


class StartProcessCall(Request):
    """Start a background program, which runs until it ends, or is killed with its children after `limit_s`.

    With `stdin`, its input is what `write_process` sends; without, it has none. With `terminal`, a terminal of that
    size is its input and output. `label` is a name chosen by the caller.
    """

    argv: Annotated[list[Text], Field(min_length=1, max_length=10_000)]
    env: dict[Name, Text] | None = None
    cwd: FilePath | None = None
    stdin: bool = False
    terminal: TerminalSize | None = None
    limit_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    label: Annotated[Name, Field(max_length=200)] = ""


class WatchProcessCall(Request):
    """Return a process's output from byte `after` on, or from now on: at the first bytes, its end, or a timeout."""

    process: ProcessName
    after: Annotated[int, Field(ge=0, le=2**62)] | None = None
    timeout_s: Annotated[float, Field(gt=0, le=60)] = 20.0


class WriteProcessCall(Request):
    """Write bytes to the input of a process; `close` closes it afterwards."""

    process: ProcessName
    data: Base64 = ""
    close: bool = False
    timeout_s: CallSeconds = CALL_S


class SignalProcessCall(Request):
    """Send a signal to a process; KILL also ends all processes that it started."""

    process: ProcessName
    signal: Literal["TERM", "KILL", "INT", "HUP", "QUIT", "USR1", "USR2", "STOP", "CONT"] = "TERM"


class ResizeProcessCall(Request):
    """Resize the terminal of a process."""

    process: ProcessName
    terminal: TerminalSize


class ListProcessesCall(Request):
    """List the started processes that have not ended."""


SandboxCall = (
    ExecCall
    | ShellCall
    | OpenShellCall
    | CloseShellCall
    | ReadCall
    | WriteCall
    | ListFilesCall
    | MoveFileCall
    | RemoveFileCall
    | MakeFolderCall
    | SandboxToolCall
    | StartProcessCall
    | WatchProcessCall
    | WriteProcessCall
    | SignalProcessCall
    | ResizeProcessCall
    | ListProcessesCall
    | ForgetCall
)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command; `code` is null after the time limit, `limit` says which limit ended it."""

    code: int | None
    stdout: str
    stderr: str
    timed_out: bool = False
    limit: str = ""


@dataclass(frozen=True, slots=True)
class ShellOutput:
    """The result of a command in a shell, like `workers.plugins.interfaces.ShellResult`.

    `expected` is the one of the expected texts with which the output ends.
    """

    code: int | None
    output: str
    cwd: str
    timed_out: bool = False
    restarted: bool = False
    n_dropped: int = 0
    running: bool = False
    limit: str = ""
    note: str = ""
    expected: str | None = None


@dataclass(frozen=True, slots=True)
class FileContent:
    """The bytes of a file or of a packed folder, in base64."""

    data: str

    @classmethod
    def of(cls, data: bytes) -> FileContent:
        """Return the content for these bytes."""
        return cls(b64encode(data).decode())

    @property
    def contents(self) -> bytes:
        return b64decode(self.data)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """`kind` is `file`, `folder`, `link` or `other`; `target` is the target of a link, `modified_at` in seconds."""

    name: str
    path: str
    kind: str
    size: int
    mode: int
    owner: str
    group: str
    modified_at: float
    target: str = ""


@dataclass(frozen=True, slots=True)
class FileList:
    """Files, sorted by depth and name."""

    files: tuple[FileEntry, ...]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The text for the model; `refused` if the tool reported an error instead.

    `artefacts` are additional outputs by name: (media type, bytes in base64).
    """

    text: str
    refused: bool = False
    done: bool = False
    answer: str | None = None
    artefacts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A started process: its unique id, its pid in the sandbox, and its command."""

    process_id: str
    pid: int
    label: str
    argv: tuple[str, ...]
    env: Mapping[str, Any]
    cwd: str


@dataclass(frozen=True, slots=True)
class ProcessList:
    """Running processes of a sandbox, oldest first."""

    processes: tuple[ProcessState, ...]


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """Bytes that a process wrote to `stdout`, `stderr` or its `terminal`, in base64."""

    stream: str
    data: str


@dataclass(frozen=True, slots=True)
class ProcessOutput:
    """The output of a process up to byte `next`; `n_dropped` bytes before it were discarded.

    Once it has `ended` and all output is returned, `code` is its exit code, negative for a signal, and `limit` says
    which limit ended it; `timed_out` if that was its own.
    """

    process_id: str
    pid: int
    pieces: tuple[OutputPiece, ...]
    next: int
    n_dropped: int = 0
    ended: bool = False
    code: int | None = None
    timed_out: bool = False
    limit: str = ""


@dataclass(frozen=True, slots=True)
class Done:
    """The result of calls without a result."""

    done: bool = True


CALLS: Mapping[str, tuple[type[Request], type[Any]]] = {
    "exec": (ExecCall, CommandResult),
    "shell": (ShellCall, ShellOutput),
    "open_shell": (OpenShellCall, ShellOutput),
    "close_shell": (CloseShellCall, Done),
    "read": (ReadCall, FileContent),
    "write": (WriteCall, Done),
    "list_files": (ListFilesCall, FileList),
    "move_file": (MoveFileCall, Done),
    "remove_file": (RemoveFileCall, Done),
    "make_folder": (MakeFolderCall, Done),
    "tool": (SandboxToolCall, ToolResult),
    "start_process": (StartProcessCall, ProcessState),
    "watch_process": (WatchProcessCall, ProcessOutput),
    "write_process": (WriteProcessCall, Done),
    "signal_process": (SignalProcessCall, Done),
    "resize_process": (ResizeProcessCall, Done),
    "list_processes": (ListProcessesCall, ProcessList),
    "forget": (ForgetCall, Done),
}
"""The verb of each call with the types of its body and its result."""
VERBS: Mapping[type[Request], str] = {body: verb for verb, (body, _) in CALLS.items()}
