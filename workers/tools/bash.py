"""The `bash` tool: one persistent shell per rollout, with input to running programs."""

from __future__ import annotations

import string
from typing import ClassVar

from pydantic import BaseModel, Field

from farm.errors import ToolError
from workers.plugins.interfaces import Observation, Sandbox, Shell, ShellResult
from workers.tools import Arguments, lines, needed, out_of_time
from workers.tools.terminal import TerminalOutput

_WAIT_S = 5.0
_KEYS = {
    "<enter>": b"\r",
    "<tab>": b"\t",
    "<esc>": b"\x1b",
    "<space>": b" ",
    "<backspace>": b"\x7f",
    "<up>": b"\x1b[A",
    "<down>": b"\x1b[B",
    "<right>": b"\x1b[C",
    "<left>": b"\x1b[D",
} | {f"c-{key}": bytes([ord(key.upper()) & 31]) for key in string.ascii_lowercase + "[\\]^_"}
"""The names of keys, in lower case, and the bytes that a terminal sends for them."""


class BashArguments(Arguments):
    command: str = Field("", description="The command to run; it may have several lines.")
    interactive: bool = Field(
        False,
        description="Give the command a terminal, for a program that asks questions or that you type to, such as "
        "`python3` or `gdb`. The call returns once it waits for you; go on with `input`.",
    )
    input: str | None = Field(
        None,
        description="Instead of a command: what to type to the program that runs interactively. It is typed as it "
        "stands, then Enter is pressed. A single key is pressed alone: `C-c` interrupts, `C-d` is the end of input; "
        "also `C-z` and so on, `<enter>`, `<tab>`, `<esc>`, `<up>`, `<down>`, `<left>`, `<right>`, `<backspace>`. "
        "Empty text types nothing and waits for more output.",
    )
    enter: bool = Field(True, description="Whether Enter is pressed after `input`.")
    wait_s: float = Field(
        _WAIT_S,
        ge=0,
        description="Only with `interactive` or `input`: how many seconds to wait for a program that is neither done "
        "nor waiting for you. It runs on.",
    )


class BashTool:
    """A `workers.plugins.interfaces.Tool`. The first call opens the shell: many rollouts never need one."""

    name: ClassVar[str] = "bash"
    description: ClassVar[str] = (
        "Run a command in a bash shell and get its output. The shell is kept: directory, variables and functions live "
        "from call to call. Normally there is no network. Standard input is empty, so a program that asks gets no "
        "answer; with `interactive` it has a terminal and you answer with `input`. Start long-running programs in the "
        "background with `&` and send their output to a file."
    )
    arguments: ClassVar[type[BaseModel]] = BashArguments

    def __init__(self, sandbox: Sandbox | None) -> None:
        self._sandbox = sandbox
        self._shell: Shell | None = None
        self._running = False
        self._terminal = TerminalOutput()

    async def call(self, arguments: BashArguments, timeout_s: float) -> Observation:
        """Return the output, then notes on its end. Raises SandboxError if the sandbox is gone."""
        sandbox = needed(self._sandbox, self.name)
        _check(arguments)
        if self._shell is None:
            self._shell = await sandbox.open_shell()
        if arguments.input is not None and not arguments.command:
            return await self._type(self._shell, arguments, timeout_s)
        before = await self._rest(self._shell) if self._running else ""
        if not arguments.interactive:
            result = await self._shell.run(arguments.command, timeout_s)
            return await self._observation(result, before, *_plain_end(result, timeout_s))
        result = await self._shell.run(arguments.command, min(arguments.wait_s, timeout_s), interactive=True)
        return await self._observed(result, before)

    async def _type(self, shell: Shell, arguments: BashArguments, timeout_s: float) -> Observation:
        if not self._running:
            raise ToolError(
                "No program is running interactively, so there is nobody to type to: start one with `command` and "
                "`interactive: true`."
            )
        return await self._observed(await shell.send(_keys(arguments), min(arguments.wait_s, timeout_s)))

    async def _rest(self, shell: Shell) -> str:
        self._running = False
        result = await shell.send(b"", 0.0)
        end = "is ended now" if result.running else f"had ended with exit code {result.code}"
        shown = await self._terminal.shown(result.output, result.full, "bash.txt")
        self._terminal = TerminalOutput()
        return lines(shown.text, f"[the program that ran before {end}; this is the output of the new command:]")

    async def _observed(self, result: ShellResult, before: str = "") -> Observation:
        self._running = result.running
        running = "[it is running; go on with `input`]"
        end = running if result.running else f"[it has ended, exit code {result.code}]"
        return await self._observation(result, before, end)

    async def _observation(self, result: ShellResult, before: str, *notes: str) -> Observation:
        shown = await self._terminal.shown(result.output, result.full, "bash.txt")
        if not result.running:
            self._terminal = TerminalOutput()
        paragraphs = [before, shown.text, *notes]
        if result.limit:
            paragraphs.append(f"[stopped by the sandbox: {result.limit}]")
        if result.restarted:
            paragraphs.append(
                f"[the shell had ended; a new one was started in {result.cwd}: set variables and functions again]"
            )
        if result.note:
            paragraphs.append(f"[{result.note}]")
        if result.n_dropped and shown.as_written:
            paragraphs.append(f"[{result.n_dropped} bytes from the middle of the output are left out]")
        return Observation(lines(*paragraphs), artefacts=shown.artefacts)

    async def close(self) -> None:
        if self._shell is not None:
            await self._shell.close()
            self._shell = None


def _check(arguments: BashArguments) -> None:
    """Raise ToolError, worded for the model, for a contradictory combination of arguments."""
    if arguments.command:
        if arguments.input:
            raise ToolError(
                "Give either `command` or `input`, not both: start the program first, then type to it in another call."
            )
        if arguments.wait_s != _WAIT_S and not arguments.interactive:
            raise ToolError(
                "`wait_s` goes with `interactive` or `input` only: without them the call returns when the command has "
                "ended, or is stopped at its time limit. Leave it out, or run the command in the background with `&`."
            )
    elif arguments.input is None:
        raise ToolError("Give a `command` to run, or `input` for the program that is running interactively.")


def _keys(arguments: BashArguments) -> bytes:
    text = arguments.input or ""
    if key := _KEYS.get(text.lower()):
        return key
    return (text.replace("\n", "\r") + ("\r" if text and arguments.enter else "")).encode()


def _plain_end(result: ShellResult, timeout_s: float) -> list[str]:
    if result.timed_out:
        return [out_of_time(timeout_s, "this is what it had written")]
    return [f"[exit code {result.code}]"] if result.code else []
