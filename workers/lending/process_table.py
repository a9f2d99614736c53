"""The processes of one borrowed sandbox: those that run, and the last ones that have ended."""

from __future__ import annotations

from base64 import b64decode

from farm.errors import InvalidRequest, NotFound, Overloaded
from farm.plugins import follows
from farm.records.lending.sandbox_calls import (
    Done,
    ListProcessesCall,
    ProcessList,
    ProcessOutput,
    ProcessState,
    ResizeProcessCall,
    SignalProcessCall,
    StartProcessCall,
    WatchProcessCall,
    WriteProcessCall,
)
from workers.lending.lent_process import LentProcess
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.optional_protocols import StartsPrograms

MAX_RUNNING = 64
MAX_ENDED = 16
"""Maximum number of ended processes whose output is kept after it was read to the end."""
MAX_UNREAD = 256
"""Maximum number of ended processes whose output was not read to the end."""


class ProcessTable:
    """Answers the calls about processes, on the event loop."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._n_started = 0
        self._n_starting = 0
        self._by_id: dict[str, LentProcess] = {}

    async def start(self, call: StartProcessCall) -> ProcessState:
        """Start a process. Raises Overloaded if too many run, InvalidRequest if this kind of sandbox has none."""
        sandbox = self._sandbox
        if not follows(sandbox, StartsPrograms):
            raise InvalidRequest("is not for this kind of sandbox: use exec or shell", field="argv")
        if len(self._running()) + self._n_starting >= MAX_RUNNING:
            raise Overloaded(f"sandbox {self._sandbox.sandbox_id} runs {MAX_RUNNING} processes: end one first")
        self._n_starting += 1
        self._n_started += 1
        number = self._n_started
        try:
            process = await LentProcess.start(f"process-{number}", number, call, sandbox)
        finally:
            self._n_starting -= 1
        self._by_id[process.process_id] = process
        self._forget_old()
        return process.state

    def _running(self) -> list[LentProcess]:
        return [process for process in self._by_id.values() if process.running]

    def _forget_old(self) -> None:
        ended = [process for process in self._by_id.values() if not process.running]
        read = [process for process in ended if process.was_read]
        unread = [process for process in ended if not process.was_read]
        for process in (*read[:-MAX_ENDED], *unread[:-MAX_UNREAD]):
            process.close()
            del self._by_id[process.process_id]

    def _process(self, name: str) -> LentProcess:
        """Return the process with an id, or a running one with a pid or a label. Raises NotFound."""
        if (process := self._by_id.get(name)) is not None:
            return process
        running = self._running()
        for process in running:
            if name == str(process.pid):
                return process
        for process in running:
            if name == process.call.label:
                return process
        raise NotFound(f"sandbox {self._sandbox.sandbox_id} has no process {name!r:.200}")

    async def watch(self, call: WatchProcessCall) -> ProcessOutput:
        return await self._process(call.process).watch(call.after, call.timeout_s)

    async def write(self, call: WriteProcessCall) -> Done:
        await self._process(call.process).write(b64decode(call.data), call.close, call.timeout_s)
        return Done()

    async def signal(self, call: SignalProcessCall) -> Done:
        await self._process(call.process).signal(call.signal)
        return Done()

    async def resize(self, call: ResizeProcessCall) -> Done:
        self._process(call.process).resize(call.terminal)
        return Done()

    async def list(self, call: ListProcessesCall) -> ProcessList:
        return ProcessList(tuple(process.state for process in self._running()))

    def close(self) -> None:
        """Kill all running processes, and forget them."""
        for process in self._by_id.values():
            process.close()
        self._by_id.clear()
