"""Bodies of SWE-ReX's requests, as its client sends them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from farm.records.lending.sandbox_calls import MAX_CALL_S, MAX_EXPECTED, ExpectedText, SessionName, Text
from farm.records.request_values import Name, Request

_LEAST_S = 0.01

RexSeconds = Annotated[float, Field(ge=0)]
_Expected = Annotated[tuple[ExpectedText, ...], Field(max_length=MAX_EXPECTED // 2)]
_Path = Annotated[Name, Field(max_length=4096)]


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
