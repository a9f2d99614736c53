"""The `python` tool: one persistent IPython per rollout."""

from __future__ import annotations

import struct
from typing import ClassVar

from pydantic import BaseModel, Field

from farm.errors import ToolError
from workers.plugins.interfaces import Artefact, CellResult, Kernel, Observation, Sandbox
from workers.tools import Arguments, lines, needed, out_of_time
from workers.tools.terminal import TerminalOutput

_NO_INPUT = "code that asks for input: there is none here"
_EARLY_ENDS = {
    "BdbQuit": ("(Pdb) ", "a debugger, such as that of `breakpoint()`: there is no input here"),
    "EOFError": ("EOF when reading a line", _NO_INPUT),
    "StdinNotImplementedError": ("", _NO_INPUT),
    "SystemExit": ("", "`sys.exit()` or the like: the session stays"),
}
"""By the error that ended a cell: its effect on the output, and why the rest of the cell was not run."""

_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8"
# Not all markers from C0 to CF are frames: C4, C8 and CC are tables (ITU-T T.81, table B.1).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


class PythonArguments(Arguments):
    code: str = Field(
        default="",
        description="Python code; the value of the last expression is shown, as in a notebook. A line that begins with "
        "`!` is run by a shell.",
    )
    restart: bool = Field(
        default=False,
        description="Restart the interpreter before the code is run: variables and imports are lost, and what earlier "
        "code left running is ended. Files stay. For when the session is in a state that is hard to repair.",
    )


class PythonTool:
    """A `workers.plugins.interfaces.Tool`. The first call starts the interpreter."""

    name: ClassVar[str] = "python"
    description: ClassVar[str] = (
        "Run Python code in an IPython session and get what it prints and the value of its last expression. The "
        "session is kept: variables and imports live from call to call. Code that does not end in time is interrupted, "
        "with its variables kept where that is possible. There is no network, and no input: `input()` fails."
    )
    arguments: ClassVar[type[BaseModel]] = PythonArguments

    def __init__(self, sandbox: Sandbox | None) -> None:
        self._sandbox = sandbox
        self._kernel: Kernel | None = None

    async def call(self, arguments: PythonArguments, timeout_s: float) -> Observation:
        """Return the output, then notes on its end. Raises SandboxError if the sandbox is gone."""
        sandbox = needed(self._sandbox, self.name)
        if not arguments.code.strip() and not arguments.restart:
            raise ToolError("`code` is empty: write the code to run, or set `restart` to restart the interpreter.")
        fresh = self._kernel is None
        if self._kernel is None:
            self._kernel = await sandbox.open_kernel()
        if arguments.restart and not fresh:
            await self._kernel.restart()
        result = await self._kernel.run(arguments.code, timeout_s)
        shown = await TerminalOutput().shown(result.output, result.full, "python.txt")
        notes = _notes(result, arguments, timeout_s)
        return Observation(lines(shown.text, *notes), artefacts=(*shown.artefacts, *result.images))

    async def close(self) -> None:
        if self._kernel is not None:
            await self._kernel.close()
            self._kernel = None


def _notes(result: CellResult, arguments: PythonArguments, timeout_s: float) -> list[str]:
    notes = [_described(image) for image in result.images]
    sign, reason = _EARLY_ENDS.get(result.error, ("", ""))
    if reason and sign in result.output:
        notes.append(f"[the cell ended early, by {reason}, and the code after it was not run]")
    if result.timed_out:
        notes.append(out_of_time(timeout_s, "this is what it had printed"))
    if result.limit:
        notes.append(f"[{result.limit}]")
    if result.restarted:
        notes.append("[the interpreter had to be restarted; all variables and imports are lost]")
    elif arguments.restart:
        notes.append("[the interpreter was restarted]")
    return notes


def _described(image: Artefact) -> str:
    size = dimensions(image.data)
    pixels = f"{size[0]}x{size[1]}, " if size else ""
    return f"[{image.media_type}, {pixels}kept as {image.name}]"


def dimensions(data: bytes) -> tuple[int, int] | None:
    """Return width and height of a PNG or JPEG in pixels; None for other or truncated files."""
    try:
        if data.startswith(_PNG):
            # The first chunk is IHDR; width and height are its first fields.
            width, height = struct.unpack_from("!II", data, 16)
            return width, height
        return _of_jpeg(data) if data.startswith(_JPEG) else None
    except struct.error:
        return None


def _of_jpeg(data: bytes) -> tuple[int, int] | None:
    start = 2
    while True:
        prefix, marker, n_bytes = struct.unpack_from("!BBH", data, start)
        if prefix != 0xFF:
            return None
        if marker in _FRAMES:
            height, width = struct.unpack_from("!HH", data, start + 5)
            return width, height
        start += 2 + n_bytes
