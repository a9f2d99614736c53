"""Bodies of SWE-ReX's requests, and its errors: status 511 with the class that its client raises, and a text."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response

from farm.client import serialization
from farm.records.lending.sandbox_calls import MAX_CALL_S, MAX_EXPECTED, ExpectedText, SessionName, Text
from farm.records.request_values import Name, Request

_LEAST_S = 0.01

RexSeconds = Annotated[float, Field(ge=0)]
_Expected = Annotated[tuple[ExpectedText, ...], Field(max_length=MAX_EXPECTED // 2)]
_Path = Annotated[Name, Field(max_length=4096)]

_STATUS = 511
_OWN = "swerex.exceptions."
PLAIN = f"{_OWN}SwerexException"
NO_SESSION = f"{_OWN}SessionDoesNotExistError"
SESSION_EXISTS = f"{_OWN}SessionExistsError"
TIMED_OUT = f"{_OWN}CommandTimeoutError"
NON_ZERO = f"{_OWN}NonZeroExitCodeError"
NO_CODE = f"{_OWN}NoExitCodeError"
BAD_SYNTAX = f"{_OWN}BashIncorrectSyntaxError"
BAD_ZIP = "zipfile.BadZipFile"
_BY_WORDS = {
    os.strerror(number): f"builtins.{name}"
    for number, name in (
        (errno.ENOENT, "FileNotFoundError"),
        (errno.EISDIR, "IsADirectoryError"),
        (errno.ENOTDIR, "NotADirectoryError"),
        (errno.EEXIST, "FileExistsError"),
        (errno.EACCES, "PermissionError"),
        (errno.EPERM, "PermissionError"),
    )
}


def call_seconds(timeout: float | None) -> float:
    """Return the time limit of calls: the maximum by default, and at most that."""
    return MAX_CALL_S if timeout is None else min(max(timeout, _LEAST_S), MAX_CALL_S)


class RexSessionRequest(Request):
    """A new session; files are sourced in it, within `startup_timeout`."""

    startup_source: Annotated[tuple[_Path, ...], Field(max_length=100)] = ()
    session: SessionName = "default"
    session_type: Literal["bash"] = "bash"
    startup_timeout: RexSeconds = 1.0


class RexSessionEnd(Request):
    session: SessionName = "default"
    session_type: Literal["bash"] = "bash"


class RexAction(Request):
    """A command in a session; or a line of input for the program in its terminal.

    Of the interactive kinds, one waits for a text of `expect`, the other must end the program.
    """

    command: Text
    session: SessionName = "default"
    timeout: RexSeconds | None = None
    is_interactive_command: bool = False
    is_interactive_quit: bool = False
    check: Literal["silent", "raise", "ignore"] = "raise"
    error_msg: Text = ""
    expect: _Expected = ()
    action_type: Literal["bash"] = "bash"


class RexInterrupt(Request):
    """Ctrl-C for the program in a session, so many times; then it is killed."""

    session: SessionName = "default"
    timeout: RexSeconds = 0.2
    n_retry: Annotated[int, Field(ge=0, le=100)] = 3
    expect: _Expected = ()
    action_type: Literal["bash_interrupt"] = "bash_interrupt"


class RexCommand(Request):
    """A command outside sessions, as words or for a shell, as in `subprocess.run`."""

    command: Text | Annotated[list[Text], Field(min_length=1, max_length=10_000)]
    timeout: RexSeconds | None = None
    shell: bool = False
    check: bool = False
    error_msg: Text = ""
    env: dict[Name, Text] | None = None
    cwd: _Path | None = None
    merge_output_streams: bool = False


class RexReadRequest(Request):
    """A file, as in `Path.read_text`."""

    path: Annotated[_Path, Field(min_length=1)]
    encoding: Annotated[Name, Field(max_length=100)] | None = None
    errors: Annotated[Name, Field(max_length=100)] | None = None


class RexWriteRequest(Request):
    content: str
    path: Annotated[_Path, Field(min_length=1)]


class RexError(Exception):
    """An error that the client raises again, as the class of this path."""

    def __init__(self, class_path: str, message: str, extra_info: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.class_path = class_path
        self.extra_info = dict(extra_info or {})

    def response(self) -> Response:
        """Return its response."""
        about = {
            "message": str(self),
            "class_path": self.class_path,
            "traceback": "",
            "extra_info": self.extra_info,
        }
        return Response(serialization.written({"swerexception": about}), _STATUS, media_type="application/json")


def raised(error: Exception) -> RexError:
    """Convert a Python exception to the error that the client raises."""
    kind = type(error)
    return RexError(f"{kind.__module__}.{kind.__name__}", str(error))


def file_error(message: str) -> RexError:
    """Return the error about a file as the Python exception for the kernel's text, with which the message ends."""
    return RexError(_BY_WORDS.get(message.rpartition(": ")[2], PLAIN), message)
