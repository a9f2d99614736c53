"""A borrowed sandbox as seen by SWE-ReX's client: sessions, commands and files.

Each request becomes one or a few calls of the sandbox, whose ids are derived from the id of the request: it may be
repeated, to this API process or another, and nothing is done twice.

An error has status 511, with the class that its client raises, and a text.
"""

from __future__ import annotations

import errno
import io
import os
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.responses import Response

from farm.api.endpoints import Endpoints
from farm.api.protocols import call_sandbox, content_hash
from farm.client import serialization
from farm.client.request_checks import checked
from farm.errors import Conflict, InvalidRequest, NotFound
from farm.records.lending.sandbox_calls import (
    MAX_CALL_S,
    MAX_EXPECTED,
    CloseShellCall,
    CommandResult,
    ExecCall,
    ExpectedText,
    FileContent,
    OpenShellCall,
    ReadCall,
    SessionName,
    ShellCall,
    ShellOutput,
    Text,
    WriteCall,
)
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

_PROMPT = "SHELLPS1PREFIX"
"""The prompt of their shell, which is what a finished command has matched."""
_CONTROL = re.compile(r"\x1b[@-_][0-?]*[ -/]*[@-~]")
_SYNTAX_CODES = (1, 2)
_SYNTAX_S = 30.0
_KILL_S = 30.0
_MERGED = ("sh", "-c", 'exec "$@" 2>&1', "sh")
_NO_TEXT = ("idna", "punycode")
"""Encodings that take quadratic time."""


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


class RexSandbox:
    """The operations.

    They raise RexError for errors that the client raises again, and the errors of `NodeLine.call`.
    """

    def __init__(self, endpoints: Endpoints, reference: str, request_id: str, body: bytes) -> None:
        self._endpoints = endpoints
        self._reference = reference
        # different requests with the same id are distinct
        self._key = content_hash([request_id, body.decode("utf-8", "replace")]) if request_id else ""

    async def create_session(self, wanted: RexSessionRequest) -> Mapping[str, Any]:
        """Open a shell, and source files in it; if that does not end in time, the shell is closed."""
        name = wanted.session
        try:
            await self._call(OpenShellCall(session=name), "open")
        except Conflict:
            raise RexError(SESSION_EXISTS, f"session {name} already exists") from None
        output = ""
        if wanted.startup_source:
            command = " ; ".join(f"source {path}" for path in wanted.startup_source)
            try:
                output = (await self._shell(name, "source", wanted.startup_timeout, command=command)).output
            except RexError:
                await self._call(CloseShellCall(session=name), "close")
                raise
        return {"output": _text(output), "session_type": "bash"}

    async def close_session(self, wanted: RexSessionEnd) -> Mapping[str, Any]:
        """Close a shell, with its processes."""
        await self._in_session(CloseShellCall(session=wanted.session), "close")
        return {"session_type": "bash"}

    async def run(self, action: RexAction) -> Mapping[str, Any]:
        """Run a command in a session, with the checks of `check`; or type a line to the program that runs there."""
        if action.is_interactive_command or action.is_interactive_quit:
            return await self._type(action)
        command = action.command
        several = "\n" in command.strip()
        if several:
            # if bash cannot parse a single line it runs nothing, of several lines it runs those before
            await self._check_syntax(command)
        how: dict[str, Any] = {"interactive": True, "expect": _expected(action.expect)} if action.expect else {}
        shown = await self._shell(action.session, "run", action.timeout, command=command, **how)
        if shown.code in _SYNTAX_CODES and not several:
            await self._check_syntax(command)
        output = _text(shown.output.removesuffix(shown.expected or ""))
        if action.check == "raise" and shown.code is None:
            reason = shown.limit or "it is still running"
            raise RexError(NO_CODE, f"command {command!r} has no exit code ({reason}); its output:\n{output!r}")
        if action.check == "raise" and shown.code != 0:
            failed = f"command {command!r} failed with exit code {shown.code}; its output:\n{output!r}"
            raise _non_zero(failed, action.error_msg)
        return _observation(output, None if action.check == "ignore" else shown.code, shown)

    async def _type(self, action: RexAction) -> Mapping[str, Any]:
        """Type a line to the program in the terminal; without one, the line is a command that gets the terminal."""
        command, expect = action.command, _expected(action.expect)
        try:
            shown = await self._shell(action.session, "keys", action.timeout, keys=f"{command}\n", expect=expect)
        except Conflict:
            shown = await self._shell(
                action.session, "run", action.timeout, command=command, interactive=True, expect=expect
            )
        output = _text(shown.output.removesuffix(shown.expected or ""))
        if not action.is_interactive_quit:
            # the terminal echoes the input
            output = output.lstrip().removeprefix(command).strip()
        return _observation(output, 0, shown)

    async def interrupt(self, action: RexInterrupt) -> Mapping[str, Any]:
        """Press Ctrl-C so many times, then kill the program in the terminal. Does nothing if none runs."""
        output, expect = "", _expected(action.expect) or None
        for turn in range(action.n_retry):
            call = ShellCall(keys="\x03", session=action.session, timeout_s=call_seconds(action.timeout), expect=expect)
            try:
                shown: ShellOutput = await self._in_session(call, f"interrupt {turn}")
            except Conflict:
                return _observation(output, 0)
            output += shown.output
            if shown.expected is not None or not shown.running:
                return _observation(_text(output.removesuffix(shown.expected or "")).strip(), 0, shown)
        # a plain command ends any program in the terminal
        await self._in_session(ShellCall(session=action.session, timeout_s=_KILL_S, opens=False), "kill")
        return _observation(_text(output).strip(), 0)

    async def execute(self, command: RexCommand) -> Mapping[str, Any]:
        """Run a command outside sessions."""
        words = [command.command] if isinstance(command.command, str) else command.command
        argv = ["/bin/sh", "-c", *words] if command.shell else words
        call = checked(
            ExecCall,
            {
                "argv": [*_MERGED, *argv] if command.merge_output_streams else argv,
                "timeout_s": call_seconds(command.timeout),
                "env": command.env,
                "cwd": command.cwd or None,
            },
        )
        result: CommandResult = await self._call(call, "exec")
        if result.timed_out:
            message = f"timeout ({call.timeout_s:g} s) exceeded while running command {command.command!r}"
            raise RexError(TIMED_OUT, message)
        for name in (command.cwd, argv[0]):
            if name and result.code in (126, 127) and result.stderr.startswith(f"sandbox: {name}: "):
                # the sandbox's own message: nothing was started
                raise file_error(result.stderr.removeprefix("sandbox: ").strip())
        if command.check and result.code != 0:
            exit_code = f"{result.code}{f', {result.limit}' if result.limit else ''}"
            shown = f"its output:\n{result.stdout!r}\nits errors:\n{result.stderr!r}"
            failed = f"command {command.command!r} failed with exit code {exit_code}; {shown}"
            raise _non_zero(failed, command.error_msg)
        return {"stdout": result.stdout, "stderr": result.stderr, "exit_code": result.code}

    async def read_file(self, wanted: RexReadRequest) -> Mapping[str, Any]:
        content: FileContent = await self._of_file(ReadCall(path=wanted.path), "read")
        return {"content": await self._endpoints.run(_decoded, content, wanted)}

    async def write_file(self, wanted: RexWriteRequest) -> Mapping[str, Any]:
        try:
            data = wanted.content.encode()
        except UnicodeEncodeError as error:
            raise raised(error) from None
        return await self.put(wanted.path, data)

    async def put(self, path: str, data: bytes, packed: bool = False) -> Mapping[str, Any]:
        """Write a file, creating its folders; or, packed, a folder from a tar."""
        call = await self._endpoints.run(_write_call, path, data, packed)
        await self._of_file(call, "write")
        return {}

    async def _check_syntax(self, command: str) -> None:
        """Raise the syntax error of a command, as reported by `bash -n`."""
        stdin = b64encode(f"{command}\n".encode("utf-8", "surrogateescape")).decode()
        call = ExecCall(argv=["bash", "-n"], stdin=stdin, timeout_s=_SYNTAX_S)
        result: CommandResult = await self._call(call, "syntax")
        if result.code in (0, None):
            return
        about = {"bash_stdout": result.stdout, "bash_stderr": result.stderr}
        wrong = f"bash cannot read the command {command!r} (exit code {result.code}):\n{result.stderr}"
        raise RexError(BAD_SYNTAX, wrong, about)

    async def _shell(self, session: str, part: str, limit_s: float | None, **values: Any) -> ShellOutput:
        """Return the result of a call in a session.

        Raises RexError at its time limit; interactive programs continue.
        """
        seconds = call_seconds(limit_s)
        call = checked(ShellCall, {"session": session, "timeout_s": seconds, "opens": False, **values})
        output: ShellOutput = await self._in_session(call, part)
        if output.timed_out or (output.running and output.expected is None):
            message = f"timeout after {seconds:g} seconds while running command {(call.command or call.keys)!r}"
            raise RexError(TIMED_OUT, message, {"output": _text(output.output)})
        return output

    async def _in_session(self, call: ShellCall | CloseShellCall, part: str) -> Any:
        try:
            return await self._call(call, part)
        except NotFound:
            # or the sandbox itself is missing
            await self._endpoints.run(self._endpoints.farm.sandboxes.get, self._reference)
            raise RexError(NO_SESSION, f"session {call.session!r} does not exist") from None

    async def _of_file(self, call: ReadCall | WriteCall, part: str) -> Any:
        try:
            return await self._call(call, part)
        except InvalidRequest as error:
            raise file_error(error.complaints[0][1]) from None

    async def _call(self, call: Request, part: str) -> Any:
        call_id = content_hash([self._key, part]) if self._key else ""
        return await call_sandbox(self._endpoints, self._reference, call, call_id)


def _expected(texts: Sequence[str]) -> list[str]:
    """Return the texts to wait for: unchanged, and also without backslashes, for clients that write patterns."""
    expected: list[str] = []
    for text in texts:
        plain = text.replace("\r\n", "\n")
        expected += [plain, *({re.sub(r"\\(\W)", r"\1", plain)} - {plain})]
    return expected


def _observation(output: str, code: int | None, shown: ShellOutput | None = None) -> Mapping[str, Any]:
    expected, reasons = _PROMPT, []
    if shown is not None:
        expected = _PROMPT if shown.expected is None else shown.expected
        if shown.limit:
            reasons.append(shown.limit)
        if shown.restarted:
            reasons.append("the shell had ended and was restarted")
        if shown.note:
            reasons.append(shown.note)
    return {
        "output": output,
        "exit_code": code,
        "failure_reason": "; ".join(reasons),
        "expect_string": expected,
        "session_type": "bash",
    }


def _text(output: str) -> str:
    return _CONTROL.sub("", output).replace("\r\n", "\n")


def _non_zero(message: str, reason: str) -> RexError:
    return RexError(NON_ZERO, f"{reason}: {message}" if reason else message)


def _write_call(path: str, data: bytes, packed: bool) -> WriteCall:
    return checked(WriteCall, {"path": path, "data": b64encode(data).decode(), "packed": packed})


def _decoded(content: FileContent, wanted: RexReadRequest) -> str:
    encoding = wanted.encoding or "utf-8"
    try:
        if encoding.lower().replace("-", "").replace("_", "") in _NO_TEXT:
            raise LookupError(f"{encoding!r} is not a text encoding")
        with io.TextIOWrapper(io.BytesIO(content.contents), encoding=encoding, errors=wanted.errors) as text:
            return text.read()
    except (LookupError, ValueError, TypeError) as error:
        raise raised(error) from None
