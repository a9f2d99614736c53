"""The `bash` tool: one persistent shell for a rollout."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, Field

from workers.interfaces import Observation, Sandbox, Shell, ShellResult
from workers.tools import lines, needed, out_of_time


class BashArguments(BaseModel):
    command: str = Field(description="The command to run; it may have several lines.")


class BashTool:
    """See `workers.interfaces.Tool`. The shell is opened by the first call: many rollouts never need one."""

    name: ClassVar[str] = "bash"
    description: ClassVar[str] = (
        "Run a command in a bash shell and get its output. The shell is kept: directory, variables and functions live "
        "from call to call. There is no network. Standard input is empty, so interactive programs end at once. Start "
        "long-running programs in the background with `&` and send their output to a file."
    )
    arguments: ClassVar[type[BaseModel]] = BashArguments

    def __init__(self, sandbox: Sandbox | None) -> None:
        self._sandbox = sandbox
        self._shell: Shell | None = None

    async def call(self, arguments: BashArguments, timeout_s: float) -> Observation:
        """Output, then what there is to say about its end. SandboxError if the sandbox is gone."""
        sandbox = needed(self._sandbox, self.name)
        if self._shell is None:
            self._shell = await sandbox.open_shell()
        return Observation(_told(await self._shell.run(arguments.command, timeout_s), timeout_s))

    async def close(self) -> None:
        if self._shell is not None:
            await self._shell.close()
            self._shell = None


def _told(result: ShellResult, timeout_s: float) -> str:
    notes = []
    if result.timed_out:
        notes.append(out_of_time(timeout_s, "this is what it had written"))
    elif result.code:
        notes.append(f"[exit code {result.code}]")
    if result.restarted:
        notes.append(f"[the shell had ended; a new one was started in {result.cwd}, with the exported variables]")
    return lines(result.output, *notes)
