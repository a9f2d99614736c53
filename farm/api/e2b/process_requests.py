"""Messages of the process service of E2B's agent, as its clients send them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from farm.api.e2b.connect_rpc import Bytes, Message
from farm.records.lending.sandbox_calls import FilePath, TerminalSize, Text
from farm.records.request_values import Name


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
