"""Calls to a borrowed sandbox and their results: one wire from client to API and from API to the node.

Bytes cross in base64; output that is shown as text has its undecodable bytes replaced.
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
"""Of a file, or of an archive of files, that crosses in one call."""
_MAX_BASE64 = MAX_FILE_BYTES * 4 // 3 + 4
_MAX_TEXT = 2_000_000


def _some_text(text: str) -> str:
    size_of(text, _MAX_TEXT)
    return text


def _is_base64(text: str) -> str:
    b64decode(text, validate=True)
    return text


Text = Annotated[str, AfterValidator(_some_text)]
"""Up to 2 MB of what may be stored."""
AS_BASE64: dict[str, Any] = {
    "contentEncoding": "base64",
    "pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
}
"""The form of bytes in base64, for the API's description."""
Base64 = Annotated[str, Field(max_length=_MAX_BASE64, json_schema_extra=AS_BASE64), AfterValidator(_is_base64)]
CallSeconds = Annotated[float, Field(gt=0, le=MAX_CALL_S)]
FilePath = Annotated[Name, Field(min_length=1, max_length=4096)]
_CallId = Annotated[Name, Field(min_length=1, max_length=200)]
SessionName = Annotated[Name, Field(min_length=1, max_length=200)]
ExpectedText = Annotated[Text, Field(min_length=1, max_length=1000)]
MAX_EXPECTED = 64
"""Texts that one call may wait for."""
ProcessName = Annotated[Name, Field(min_length=1, max_length=200)]
"""The id of a process; or the pid, or the label, of one that runs."""


class ExecCall(Request):
    """One command to its end, by its words."""

    argv: Annotated[list[Text], Field(min_length=1, max_length=10_000)]
    timeout_s: CallSeconds = CALL_S
    stdin: Base64 = ""
    env: dict[Name, Text] | None = None
    cwd: FilePath | None = None


class ShellCall(Request):
    """A command in a persistent shell, or keys for the program that runs there with the terminal.

    `session` names the shell, which is opened by its first command if it `opens`. With `interactive` the call returns
    as soon as the program waits for its user; `keys` goes on with it. With `expect` it returns once the program has
    written one of these texts, or has ended.
    """

    command: Text = ""
    keys: Text | None = None
    session: SessionName = "default"
    timeout_s: CallSeconds = CALL_S
    interactive: bool = False
    opens: bool = True
    expect: Annotated[list[ExpectedText], Field(max_length=MAX_EXPECTED)] | None = None


class OpenShellCall(Request):
    """A new shell, of a name that none has."""

    session: SessionName = "default"


class CloseShellCall(Request):
    session: SessionName = "default"


class ReadCall(Request):
    """A file; or, `packed`, a folder as a tar."""

    path: FilePath
    packed: bool = False


class WriteCall(Request):
    """A file; or, `packed`, a folder with the contents of a tar. Folders above it are made."""

    path: FilePath
    data: Base64
    packed: bool = False


class ListFilesCall(Request):
    """The files of a folder, and of those in it down to a `depth`; of depth 0, the file or folder itself."""

    path: FilePath
    depth: Annotated[int, Field(ge=0, le=100)] = 1


class MoveFileCall(Request):
    """A file or folder, to a new path. Folders above that are made."""

    path: FilePath
    target: FilePath


class RemoveFileCall(Request):
    """A file, or a folder with all that is in it."""

    path: FilePath


class MakeFolderCall(Request):
    """A folder that is not there yet. Those above it are made."""

    path: FilePath


class SandboxToolCall(Request):
    """A call of one of the farm's tools, whose state, as the Python of `python`, is kept in between."""

    name: Annotated[Name, Field(max_length=64)]
    arguments: Json = Field(default_factory=dict)
    timeout_s: CallSeconds = CALL_S


class ForgetCall(Request):
    """Forget the results of calls that their caller has: the same ids are other calls from now on."""

    call_ids: Annotated[list[_CallId], Field(max_length=1000)]


class TerminalSize(Request):
    rows: Annotated[int, Field(ge=1, le=10_000)] = 50
    columns: Annotated[int, Field(ge=1, le=10_000)] = 200


class StartProcessCall(Request):
    """A program that runs on after the call, until it ends or, with all that it started, is killed after `limit_s`.

    It reads what `write_process` sends with `stdin`, and nothing without. With `terminal`, a terminal of that size is
    its input and output. `label` is a name of the caller's for it.
    """

    argv: Annotated[list[Text], Field(min_length=1, max_length=10_000)]
    env: dict[Name, Text] | None = None
    cwd: FilePath | None = None
    stdin: bool = False
    terminal: TerminalSize | None = None
    limit_s: Annotated[float, Field(gt=0, le=86_400)] | None = None
    label: Annotated[Name, Field(max_length=200)] = ""


class WatchProcessCall(Request):
    """The output of a process from byte `after` of it, or from now on; returns at the first, at the end, or in time."""

    process: ProcessName
    after: Annotated[int, Field(ge=0, le=2**62)] | None = None
    timeout_s: Annotated[float, Field(gt=0, le=60)] = 20.0


class WriteProcessCall(Request):
    """Bytes for the input of a process, which is closed after them with `close`."""

    process: ProcessName
    data: Base64 = ""
    close: bool = False
    timeout_s: CallSeconds = CALL_S


class SignalProcessCall(Request):
    """A signal for a process; KILL ends all that it started as well."""

    process: ProcessName
    signal: Literal["TERM", "KILL", "INT", "HUP", "QUIT", "USR1", "USR2", "STOP", "CONT"] = "TERM"


class ResizeProcessCall(Request):
    """A new size for the terminal of a process."""

    process: ProcessName
    terminal: TerminalSize


class ListProcessesCall(Request):
    """The processes that were started and have not ended."""


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
    """The result of a command in a shell, as `workers.plugins.interfaces.ShellResult` has it.

    `expected` is the text with which the output ends, of those that the call waited for.
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
        """Return the content of these bytes."""
        return cls(b64encode(data).decode())

    @property
    def contents(self) -> bytes:
        return b64decode(self.data)


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A `kind` of `file`, `folder`, `link` or `other`; `target` is what a link leads to, `modified_at` in seconds."""

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
    """Files, in order of depth and name."""

    files: tuple[FileEntry, ...]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The text that a model is shown; `refused` if the tool complained instead of doing it.

    `artefacts` are what it made besides, by name: (media type, bytes in base64).
    """

    text: str
    refused: bool = False
    done: bool = False
    answer: str | None = None
    artefacts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process that was started: an id that no other has, its number in the sandbox, what it was started with."""

    process_id: str
    pid: int
    label: str
    argv: tuple[str, ...]
    env: Mapping[str, Any]
    cwd: str


@dataclass(frozen=True, slots=True)
class ProcessList:
    """Processes of a sandbox that run, the oldest first."""

    processes: tuple[ProcessState, ...]


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """Bytes that a process wrote to `stdout`, `stderr` or its `terminal`, in base64."""

    stream: str
    data: str


@dataclass(frozen=True, slots=True)
class ProcessOutput:
    """The output of a process up to byte `next` of it; `n_dropped` bytes before it are not kept any more.

    Once it has `ended` and all is told, `code` is its exit code, negative for a signal, and `limit` says which limit
    ended it; `timed_out` if that was its own.
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
    """The result of a call that has none."""

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
"""The verb of each call with the types of its body and of its result."""
VERBS: Mapping[type[Request], str] = {body: verb for verb, (body, _) in CALLS.items()}
