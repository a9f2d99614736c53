"""The `python` tool: one persistent IPython for a rollout."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, Field

from workers.interfaces import CellResult, Kernel, Observation, Sandbox
from workers.tools import lines, needed, out_of_time


class PythonArguments(BaseModel):
    code: str = Field(description="Python code; the value of a last expression is shown, as in a notebook.")


class PythonTool:
    """See `workers.interfaces.Tool`. The interpreter is started by the first call."""

    name: ClassVar[str] = "python"
    description: ClassVar[str] = (
        "Run Python code in an IPython session and get what it prints and the value of its last expression. The "
        "session is kept: variables and imports live from call to call. There is no network."
    )
    arguments: ClassVar[type[BaseModel]] = PythonArguments

    def __init__(self, sandbox: Sandbox | None) -> None:
        self._sandbox = sandbox
        self._kernel: Kernel | None = None

    async def call(self, arguments: PythonArguments, timeout_s: float) -> Observation:
        """Output, then what there is to say about its end. SandboxError if the sandbox is gone."""
        sandbox = needed(self._sandbox, self.name)
        if self._kernel is None:
            self._kernel = await sandbox.open_kernel()
        return Observation(_told(await self._kernel.run(arguments.code, timeout_s), timeout_s))

    async def close(self) -> None:
        if self._kernel is not None:
            await self._kernel.close()
            self._kernel = None


def _told(result: CellResult, timeout_s: float) -> str:
    notes = []
    if result.timed_out:
        notes.append(out_of_time(timeout_s, "this is what it had printed"))
    if result.restarted:
        notes.append("[the interpreter had to be restarted; all variables and imports are lost]")
    return lines(result.output, *notes)
