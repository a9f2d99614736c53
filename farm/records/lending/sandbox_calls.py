"""Calls to a borrowed sandbox and their results: one wire from client to API and from API to the node.

Bytes cross in base64; output that is shown as text has its undecodable bytes replaced.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

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
Base64 = Annotated[str, Field(max_length=_MAX_BASE64), AfterValidator(_is_base64)]
CallSeconds = Annotated[float, Field(gt=0, le=MAX_CALL_S)]
_Path = Annotated[Name, Field(min_length=1, max_length=4096)]
_CallId = Annotated[Name, Field(min_length=1, max_length=200)]
SessionName = Annotated[Name, Field(min_length=1, max_length=200)]
ExpectedText = Annotated[Text, Field(min_length=1, max_length=1000)]
MAX_EXPECTED = 64
"""Texts that one call may wait for."""


class ExecCall(Request):
    """One command to its end, by its words."""

    argv: Annotated[list[Text], Field(min_length=1, max_length=10_000)]
    timeout_s: CallSeconds = CALL_S
    stdin: Base64 = ""
    env: dict[Name, Text] | None = None
    cwd: _Path | None = None


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

    path: _Path
    packed: bool = False


class WriteCall(Request):
    """A file; or, `packed`, a folder with the contents of a tar. Folders above it are made."""

    path: _Path
    data: Base64
    packed: bool = False


class SandboxToolCall(Request):
    """A call of one of the farm's tools, whose state, as the Python of `python`, is kept in between."""

    name: Annotated[Name, Field(max_length=64)]
    arguments: Json = Field(default_factory=dict)
    timeout_s: CallSeconds = CALL_S


class ForgetCall(Request):
    """Forget the results of calls that their caller has: the same ids are other calls from now on."""

    call_ids: Annotated[list[_CallId], Field(max_length=1000)]


SandboxCall = (
    ExecCall | ShellCall | OpenShellCall | CloseShellCall | ReadCall | WriteCall | SandboxToolCall | ForgetCall
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
    """The result of a command in a shell, as `workers.interfaces.ShellResult` has it.

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
    "tool": (SandboxToolCall, ToolResult),
    "forget": (ForgetCall, Done),
}
"""The verb of each call with the types of its body and of its result."""
VERBS: Mapping[type[Request], str] = {body: verb for verb, (body, _) in CALLS.items()}
