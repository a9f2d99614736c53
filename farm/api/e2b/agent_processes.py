"""The process service of E2B's agent: commands and terminals, with output as streams."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from starlette.responses import Response, StreamingResponse

from farm.api.e2b.agent_files import AgentSandbox
from farm.api.e2b.connect_rpc import (
    STREAM,
    Bytes,
    ConnectCode,
    ConnectError,
    Message,
    SandboxMissing,
    connect_error,
    framed,
    messages,
    only_message,
    stream_end,
    unary_message,
    unary_response,
)
from farm.api.endpoints import KEY_CHECK, Endpoints
from farm.api.schemas import ApiRequest
from farm.client.request_checks import checked
from farm.errors import FarmError, NotAllowed
from farm.records.lending.borrowed_sandbox import MAX_LEASE_S
from farm.records.lending.sandbox_calls import (
    FilePath,
    ListProcessesCall,
    ProcessList,
    ProcessOutput,
    ProcessState,
    ResizeProcessCall,
    SignalProcessCall,
    StartProcessCall,
    TerminalSize,
    Text,
    WatchProcessCall,
    WriteProcessCall,
)
from farm.records.request_values import Name

_WATCH_S = 20.0
_PING_S = 50.0
_LEAST_PING_S = 1.0
_STREAMS = {"stdout": "stdout", "stderr": "stderr", "terminal": "pty"}
_SIGNALS = {"SIGNAL_SIGTERM": "TERM", "SIGNAL_SIGKILL": "KILL", 15: "TERM", 9: "KILL"}
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


class ProcessConfig(Message):
    """A program with its arguments."""

    cmd: Annotated[Text, Field(min_length=1)]
    args: Annotated[list[Text], Field(max_length=10_000)] = Field(default_factory=list)
    envs: dict[Name, Text] = Field(default_factory=dict)
    cwd: FilePath | None = None


class PtySize(Message):
    cols: Annotated[int, Field(ge=1, le=10_000)] = 80
    rows: Annotated[int, Field(ge=1, le=10_000)] = 24


class Pty(Message):
    """A terminal; its default size is the traditional one."""

    size: PtySize = PtySize()

    @property
    def terminal(self) -> TerminalSize:
        return TerminalSize(rows=self.size.rows, columns=self.size.cols)


class ProcessSelector(Message):
    """A process by its number, or by the tag that it was started with."""

    pid: Annotated[int, Field(ge=1, le=2**32 - 1)] | None = None
    tag: Annotated[Name, Field(min_length=1, max_length=200)] | None = None

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if self.pid is None and self.tag is None:
            raise ValueError("must name a pid or a tag")
        return self

    @property
    def process(self) -> str:
        """Its name in calls to a sandbox."""
        return str(self.pid) if self.tag is None else self.tag


class StartRequest(Message):
    """A process; by default it has an input, as clients that do not say expect one."""

    process: ProcessConfig
    pty: Pty | None = None
    tag: Annotated[Name, Field(max_length=200)] = ""
    stdin: bool = True


class SelectRequest(Message):
    """A process to connect to, or whose input is to be closed."""

    process: ProcessSelector


class UpdateRequest(Message):
    process: ProcessSelector
    pty: Pty | None = None


class ProcessInput(Message):
    """Bytes for the input of a process, or for its terminal."""

    stdin: Bytes = b""
    pty: Bytes = b""

    @property
    def data(self) -> bytes:
        return self.stdin or self.pty


class SendInputRequest(Message):
    process: ProcessSelector
    input: ProcessInput = ProcessInput()


class SendSignalRequest(Message):
    process: ProcessSelector
    signal: Literal["SIGNAL_SIGTERM", "SIGNAL_SIGKILL", 15, 9]


class _InputStart(Message):
    process: ProcessSelector


class _InputData(Message):
    input: ProcessInput = ProcessInput()


class StreamInputRequest(Message):
    """A message of a stream of input: first the process, then its input, with keepalives in between."""

    start: _InputStart | None = None
    data: _InputData | None = None


class ListRequest(Message):
    """A request for the running processes."""


class AgentProcesses:
    """The verbs, on the endpoints of an API."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints

    async def start(self, request: ApiRequest) -> Response:
        """Start a process, and stream its output until its end. The request's time limit is that of the process."""
        sandbox = AgentSandbox(self._endpoints, request)
        wanted = await only_message(request, StartRequest)
        config = wanted.process
        call = checked(
            StartProcessCall,
            {
                "argv": [config.cmd, *config.args],
                "env": config.envs,
                "cwd": config.cwd or None,
                "stdin": wanted.stdin and wanted.pty is None,
                "terminal": None if wanted.pty is None else wanted.pty.terminal,
                "limit_s": _limit_s(request),
                "label": wanted.tag,
            },
        )
        started: ProcessState = await sandbox.call(call)
        stream = _ProcessStream(self._endpoints, sandbox, request)
        return stream.response(started.process_id, started.pid, 0, None)

    async def connect(self, request: ApiRequest) -> Response:
        """Stream the output of a process from now on. At the request's time limit the stream ends, not the process."""
        sandbox = AgentSandbox(self._endpoints, request)
        wanted = await only_message(request, SelectRequest)
        # a watch without waiting tells that the process exists, and the present offset of its output
        least = WatchProcessCall(process=wanted.process.process, timeout_s=0.001)
        output: ProcessOutput = await sandbox.call(least)
        stream = _ProcessStream(self._endpoints, sandbox, request)
        return stream.response(output.process_id, output.pid, output.next, _limit_s(request))

    async def list(self, request: ApiRequest) -> Response:
        sandbox = AgentSandbox(self._endpoints, request)
        await unary_message(request, ListRequest)
        listing: ProcessList = await sandbox.call(ListProcessesCall())
        return unary_response({"processes": list(map(_info, listing.processes))})

    async def update(self, request: ApiRequest) -> Response:
        """Set the size of a terminal."""
        sandbox = AgentSandbox(self._endpoints, request)
        wanted = await unary_message(request, UpdateRequest)
        if wanted.pty is not None:
            await sandbox.call(ResizeProcessCall(process=wanted.process.process, terminal=wanted.pty.terminal))
        return unary_response({})

    async def send_input(self, request: ApiRequest) -> Response:
        sandbox = AgentSandbox(self._endpoints, request)
        wanted = await unary_message(request, SendInputRequest)
        await sandbox.call(_write_call(wanted.process, wanted.input))
        return unary_response({})

    async def stream_input(self, request: ApiRequest) -> Response:
        """Write the request's stream to the input of a process."""
        sandbox = AgentSandbox(self._endpoints, request)
        process: ProcessSelector | None = None
        async for message in messages(request, StreamInputRequest):
            if message.start is not None:
                process = message.start.process
            if message.data is not None:
                if process is None:
                    raise ConnectError(ConnectCode.INVALID_ARGUMENT, "the stream must name a process before its input")
                await sandbox.call(_write_call(process, message.data.input))
        answer = framed({}) + stream_end()
        return Response(answer, media_type=STREAM)

    async def close_stdin(self, request: ApiRequest) -> Response:
        sandbox = AgentSandbox(self._endpoints, request)
        wanted = await unary_message(request, SelectRequest)
        await sandbox.call(WriteProcessCall(process=wanted.process.process, close=True))
        return unary_response({})

    async def send_signal(self, request: ApiRequest) -> Response:
        """Send a signal. SIGKILL also ends all descendants of the process."""
        sandbox = AgentSandbox(self._endpoints, request)
        wanted = await unary_message(request, SendSignalRequest)
        values = {"process": wanted.process.process, "signal": _SIGNALS[wanted.signal]}
        await sandbox.call(checked(SignalProcessCall, values))
        return unary_response({})


class _ProcessStream:
    """The events of one process, for one client."""

    def __init__(self, endpoints: Endpoints, sandbox: AgentSandbox, request: ApiRequest) -> None:
        self._endpoints = endpoints
        self._sandbox = sandbox
        self._ping_s = _ping_s(request)

    def response(self, process_id: str, pid: int, after: int, limit_s: float | None) -> StreamingResponse:
        """Return the stream from an offset of the output on; it ends with the process, or after `limit_s`."""
        events = self._events(process_id, pid, after, limit_s)
        return StreamingResponse(events, headers=_HEADERS, media_type=STREAM)

    async def _events(self, process_id: str, pid: int, after: int, limit_s: float | None) -> AsyncIterator[bytes]:
        try:
            yield _event("start", {"pid": pid})
            async with asyncio.timeout(limit_s):
                async for event in self._output(process_id, after):
                    yield event
            yield stream_end()
        except TimeoutError:
            yield stream_end(ConnectError(ConnectCode.DEADLINE_EXCEEDED, f"the stream has lasted {limit_s:g} s"))
        except ConnectError as error:
            yield stream_end(error)
        except (SandboxMissing, FarmError, NotAllowed) as error:
            yield stream_end(connect_error(error))

    async def _output(self, process_id: str, after: int) -> AsyncIterator[bytes]:
        clock = asyncio.get_running_loop().time
        sent_at = clock()
        while not self._endpoints.is_closed:
            await KEY_CHECK.get()()
            wait_s = min(_WATCH_S, self._ping_s)
            output: ProcessOutput = await self._sandbox.call(
                WatchProcessCall(process=process_id, after=after, timeout_s=wait_s)
            )
            if output.n_dropped:
                yield _data(output.pieces[0].stream, _dropped(output.n_dropped))
            for piece in output.pieces:
                yield _event("data", {_STREAMS[piece.stream]: piece.data})
            after = output.next
            if output.timed_out:
                raise ConnectError(ConnectCode.DEADLINE_EXCEEDED, "the process was killed at its time limit")
            if output.ended:
                yield _event("end", _end(output))
                return
            if output.pieces:
                sent_at = clock()
            elif clock() - sent_at >= self._ping_s:
                yield _event("keepalive", {})
                sent_at = clock()
        raise ConnectError(ConnectCode.UNAVAILABLE, "this API process ends: connect to the process again")


def _event(kind: str, value: Mapping[str, Any]) -> bytes:
    return framed({"event": {kind: value}})


def _data(stream: str, data: bytes) -> bytes:
    return _event("data", {_STREAMS[stream]: b64encode(data).decode()})


def _dropped(n_bytes: int) -> bytes:
    return b"\n[... %d bytes left out: nobody read them ...]\n" % n_bytes


def _end(output: ProcessOutput) -> dict[str, Any]:
    code = output.code
    if code is None:
        return {"exitCode": -1, "exited": False, "status": "unknown", "error": "the monitor of the process was killed"}
    by_signal = code < 0
    status = f"signal: {-code}" if by_signal else f"exit status {code}"
    error = output.limit or (status if code else "")
    end: dict[str, Any] = {"exitCode": -1 if by_signal else code, "exited": not by_signal, "status": status}
    return {**end, "error": error} if error else end


def _info(process: ProcessState) -> dict[str, Any]:
    config: dict[str, Any] = {"cmd": process.argv[0], "args": list(process.argv[1:]), "envs": dict(process.env)}
    if process.cwd:
        config["cwd"] = process.cwd
    return {"config": config, "pid": process.pid, **({"tag": process.label} if process.label else {})}


def _write_call(process: ProcessSelector, given: ProcessInput) -> WriteProcessCall:
    return checked(WriteProcessCall, {"process": process.process, "data": b64encode(given.data).decode()})


def _limit_s(request: ApiRequest) -> float | None:
    """Return the time limit of a request, at most the longest lease of a sandbox."""
    milliseconds = request.headers.get("connect-timeout-ms", "")
    if not milliseconds:
        return None
    if not milliseconds.isdecimal() or len(milliseconds) > 10 or not int(milliseconds):
        wrong = f"connect-timeout-ms is {milliseconds!r:.40}, which is no number of milliseconds"
        raise ConnectError(ConnectCode.INVALID_ARGUMENT, wrong)
    return min(int(milliseconds) / 1000, MAX_LEASE_S)


def _ping_s(request: ApiRequest) -> float:
    seconds = request.headers.get("keepalive-ping-interval", "")
    return max(_LEAST_PING_S, float(seconds)) if seconds.isdecimal() and len(seconds) < 6 else _PING_S
