"""A borrowed sandbox as seen by SWE-ReX's client: sessions, commands and files.

Each request becomes one or a few calls of the sandbox, whose ids are derived from the id of the request: it may be
repeated, to this API process or another, and nothing is done twice.
"""

from __future__ import annotations

import io
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from farm.api.endpoints import Endpoints
from farm.api.protocol_parts import call_sandbox, content_hash
from farm.api.swe_rex import rex_messages
from farm.api.swe_rex.rex_messages import (
    RexAction,
    RexCommand,
    RexError,
    RexInterrupt,
    RexReadRequest,
    RexSessionEnd,
    RexSessionRequest,
    RexWriteRequest,
    call_seconds,
)
from farm.client.request_checks import checked
from farm.errors import Conflict, InvalidRequest, NotFound
from farm.records.lending.sandbox_calls import (
    CloseShellCall,
    CommandResult,
    ExecCall,
    FileContent,
    OpenShellCall,
    ReadCall,
    ShellCall,
    ShellOutput,
    WriteCall,
)
from farm.records.request_values import Request

_PROMPT = "SHELLPS1PREFIX"
"""The prompt of their shell, which is what a finished command has matched."""
_CONTROL = re.compile(r"\x1b[@-_][0-?]*[ -/]*[@-~]")
_SYNTAX_CODES = (1, 2)
_SYNTAX_S = 30.0
_KILL_S = 30.0
_MERGED = ("sh", "-c", 'exec "$@" 2>&1', "sh")
_NO_TEXT = ("idna", "punycode")
"""Encodings that take quadratic time."""


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
            raise RexError(rex_messages.SESSION_EXISTS, f"session {name} already exists") from None
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
            why = shown.limit or "it is still running"
            raise RexError(
                rex_messages.NO_CODE, f"command {command!r} has no exit code ({why}); its output:\n{output!r}"
            )
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
        argv = _argv(command)
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
            late = f"timeout ({call.timeout_s:g} s) exceeded while running command {command.command!r}"
            raise RexError(rex_messages.TIMED_OUT, late)
        for name in (command.cwd, argv[0]):
            if name and result.code in (126, 127) and result.stderr.startswith(f"sandbox: {name}: "):
                # the sandbox's own message: nothing was started
                raise rex_messages.file_error(result.stderr.removeprefix("sandbox: ").strip())
        if command.check and result.code != 0:
            why = f"{result.code}{f', {result.limit}' if result.limit else ''}"
            shown = f"its output:\n{result.stdout!r}\nits errors:\n{result.stderr!r}"
            failed = f"command {command.command!r} failed with exit code {why}; {shown}"
            raise _non_zero(failed, command.error_msg)
        return {"stdout": result.stdout, "stderr": result.stderr, "exit_code": result.code}

    async def read_file(self, wanted: RexReadRequest) -> Mapping[str, Any]:
        content: FileContent = await self._of_file(ReadCall(path=wanted.path), "read")
        return {"content": await self._endpoints.run(_decoded, content, wanted)}

    async def write_file(self, wanted: RexWriteRequest) -> Mapping[str, Any]:
        try:
            data = wanted.content.encode()
        except UnicodeEncodeError as error:
            raise rex_messages.raised(error) from None
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
        raise RexError(rex_messages.BAD_SYNTAX, wrong, about)

    async def _shell(self, session: str, part: str, limit_s: float | None, **values: Any) -> ShellOutput:
        """Return the result of a call in a session.

        Raises RexError at its time limit; interactive programs continue.
        """
        seconds = call_seconds(limit_s)
        call = checked(ShellCall, {"session": session, "timeout_s": seconds, "opens": False, **values})
        shown: ShellOutput = await self._in_session(call, part)
        if shown.timed_out or (shown.running and shown.expected is None):
            late = f"timeout after {seconds:g} seconds while running command {(call.command or call.keys)!r}"
            raise RexError(rex_messages.TIMED_OUT, late, {"output": _text(shown.output)})
        return shown

    async def _in_session(self, call: ShellCall | CloseShellCall, part: str) -> Any:
        try:
            return await self._call(call, part)
        except NotFound:
            # or the sandbox itself is missing
            await self._endpoints.run(self._endpoints.farm.sandboxes.get, self._reference)
            raise RexError(rex_messages.NO_SESSION, f"session {call.session!r} does not exist") from None

    async def _of_file(self, call: ReadCall | WriteCall, part: str) -> Any:
        try:
            return await self._call(call, part)
        except InvalidRequest as error:
            raise rex_messages.file_error(error.complaints[0][1]) from None

    async def _call(self, call: Request, part: str) -> Any:
        call_id = content_hash([self._key, part]) if self._key else ""
        return await call_sandbox(self._endpoints, self._reference, call, call_id)


def _argv(command: RexCommand) -> list[str]:
    words = [command.command] if isinstance(command.command, str) else command.command
    return ["/bin/sh", "-c", *words] if command.shell else words


def _expected(texts: Sequence[str]) -> list[str]:
    """Return the texts to wait for: unchanged, and also without backslashes, for clients that write patterns."""
    result: list[str] = []
    for text in texts:
        ours = text.replace("\r\n", "\n")
        result += [ours, *({re.sub(r"\\(\W)", r"\1", ours)} - {ours})]
    return result


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
    return RexError(rex_messages.NON_ZERO, f"{reason}: {message}" if reason else message)


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
        raise rex_messages.raised(error) from None
