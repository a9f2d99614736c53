"""The handle of a background process in a borrowed sandbox."""

from __future__ import annotations

import time
from base64 import b64decode, b64encode
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from farm.client.request_checks import checked
from farm.records.lending.sandbox_calls import (
    ProcessOutput,
    ResizeProcessCall,
    SignalProcessCall,
    TerminalSize,
    WatchProcessCall,
    WriteProcessCall,
)

if TYPE_CHECKING:
    from farm.client.sandboxes.borrower import Borrower

_WATCH_S = 20.0
_SHORTEST_S = 0.001


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
