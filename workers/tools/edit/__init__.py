"""The `edit` tool: view and change files by exact text, with the wording of common editor tools.

Everything else in a file is kept: other bytes, mode, links, line ends, a missing final one. A change can be undone only
while the file is unchanged since: later writes of other programs are never lost.
"""

from __future__ import annotations

import posixpath
from typing import ClassVar, Literal, TypeVar

from pydantic import BaseModel, Field

from farm.errors import ToolError
from workers.plugins.interfaces import Observation, Sandbox
from workers.tools import Arguments, lines, needed
from workers.tools.edit.files import (
    Files,
    IsFolder,
    as_kept,
    as_read,
    end_of_line,
    explained,
    line_at,
    line_end,
    lines_of,
    numbered,
    quoted,
    rows_of,
)

_Value = TypeVar("_Value")

CONTEXT_LINES = 4


class EditArguments(Arguments):
    command: Literal["view", "create", "str_replace", "insert", "undo_edit"] = Field(description="What to do.")
    path: str = Field(description="Absolute path of a file, or of a folder to view, such as `/workspace/a.py`.")
    view_range: list[int] | None = Field(
        default=None,
        min_length=2,
        max_length=2,
        description="For `view` of a file: first and last line to show, from 1; -1 is the end.",
    )
    file_text: str | None = Field(default=None, description="For `create`: the contents of the file.")
    old_str: str | None = Field(
        default=None, description="For `str_replace`: the text to replace; must occur exactly once, blanks included."
    )
    new_str: str | None = Field(default=None, description="For `str_replace`: what replaces it; nothing by default.")
    insert_line: int | None = Field(default=None, description="For `insert`: the line after which; 0 is the top.")
    insert_text: str | None = Field(default=None, description="For `insert`: the text to insert.")


class EditTool:
    """A `workers.plugins.interfaces.Tool`. Keeps the text that its changes removed, for `undo_edit`."""

    name: ClassVar[str] = "edit"
    description: ClassVar[str] = (
        "View, create and edit files. `view` shows a file with line numbers, or a folder, two levels deep. "
        "`create` writes a file, replacing one that exists. `str_replace` replaces `old_str`, which must occur exactly "
        "once in the file. `insert` puts text after a line. `undo_edit` takes back the last change to a file that was "
        "made with this tool."
    )
    arguments: ClassVar[type[BaseModel]] = EditArguments

    def __init__(self, sandbox: Sandbox | None) -> None:
        self._sandbox = sandbox
        self._files: Files | None = None

    async def call(self, arguments: EditArguments, timeout_s: float) -> Observation:
        """Run a command; return its result, with the lines around a change. Raises ToolError, worded for the model."""
        if self._files is None:
            self._files = Files(needed(self._sandbox, self.name))
        _check(arguments.path)
        if arguments.command == "view":
            return Observation(await _view(self._files, arguments, timeout_s))
        return Observation(await _DO[arguments.command](self._files, arguments))

    async def close(self) -> None:
        """Do nothing: nothing is held in the sandbox."""


async def _view(files: Files, arguments: EditArguments, timeout_s: float) -> str:
    path, notes = arguments.path, []
    try:
        data = await files.read(path)
    except IsFolder:
        if arguments.view_range is not None:
            raise ToolError("The `view_range` parameter is not allowed when `path` points to a directory.") from None
        return await files.listing(path, timeout_s)
    rows = rows_of(as_read(path, data))
    if not rows:
        return f"The file {path} is empty."
    first, last = _range(arguments.view_range, len(rows))
    if last > len(rows):
        notes.append(f"[The file ends at line {len(rows)}.]")
    if last >= len(rows) and not data.endswith(b"\n"):
        notes.append("[No newline at end of file]")
    if line_end(data) == b"\r\n":
        notes.append(r"[Its lines end in \r\n. Write \n for it; \r\n is kept in the file.]")
    return lines(f"Here's the result of running `cat -n` on {path}:", numbered(rows, first, last), *notes)


async def _create(files: Files, arguments: EditArguments) -> str:
    await files.create(arguments.path, _given(arguments.file_text, "file_text", "create").encode())
    return f"File created successfully at: {arguments.path}"


async def _str_replace(files: Files, arguments: EditArguments) -> str:
    path, old_str = arguments.path, _given(arguments.old_str, "old_str", "str_replace")
    data = await files.read(path)
    text, end = as_read(path, data), line_end(data)
    old, new = as_kept(old_str, end), as_kept(arguments.new_str or "", end)
    if not old:
        raise ToolError("No replacement was performed, as old_str is empty. Use `insert` to add text.")
    at = data.find(old)
    if at < 0:
        missing = f"No replacement was performed, old_str `{quoted(old_str)}` did not appear verbatim in {path}."
        raise ToolError(f"{missing} {explained(text, old_str)}".rstrip())
    if data.find(old, at + 1) >= 0:
        raise ToolError(
            f"No replacement was performed. Multiple occurrences of old_str `{quoted(old_str)}` in lines "
            f"{lines_of(data, old)}. Please ensure it is unique."
        )
    if old == new:
        raise ToolError("No replacement was performed, as old_str and new_str are the same.")
    return _edited(path, await files.splice(path, data, at, len(old), new), at, len(new))


async def _insert(files: Files, arguments: EditArguments) -> str:
    path, new_text = arguments.path, _given(arguments.insert_text, "insert_text", "insert")
    line = _given(arguments.insert_line, "insert_line", "insert")
    data = await files.read(path)
    n_lines, end = len(rows_of(as_read(path, data))), line_end(data)
    if not 0 <= line <= n_lines:
        raise ToolError(
            f"Invalid `insert_line` parameter: {line}. It should be within the range of lines of the file: "
            f"[0, {n_lines}]."
        )
    at, new = end_of_line(data, line), as_kept(new_text, end)
    if line and not data[:at].endswith(b"\n"):
        new = end + new  # The file does not end in a line break, and stays so.
    elif not new.endswith(b"\n"):
        new += end
    return _edited(path, await files.splice(path, data, at, 0, new), at, len(new))


async def _undo_edit(files: Files, arguments: EditArguments) -> str:
    path = arguments.path
    change, restored = await files.undo(path)
    text = f"Last edit to {path} undone successfully."
    if change.removed is None:
        return f"{text} The file had been created by it and is gone."
    return f"{text} {_snippet(path, restored, change.offset, len(change.removed))}".rstrip()


_DO = {"create": _create, "str_replace": _str_replace, "insert": _insert, "undo_edit": _undo_edit}


def _check(path: str) -> None:
    if "\0" in path:
        raise ToolError("The path holds a NUL character, which no path can.")
    if not path.startswith("/"):
        raise ToolError(
            f"The path {path} is not an absolute path, it should start with `/`. "
            f"Maybe you meant {posixpath.join('/', path)}?"
        )


def _given(value: _Value | None, name: str, command: str) -> _Value:
    if value is None:
        raise ToolError(f"Parameter `{name}` is required for command: {command}.")
    return value


def _range(line_range: list[int] | None, n_lines: int) -> tuple[int, int]:
    """Return the first and last line to show; the last may be beyond the end."""
    first, last = line_range or (1, -1)
    if not 1 <= first <= n_lines or not (last == -1 or first <= last):
        raise ToolError(
            f"Invalid `view_range`: [{first}, {last}]. Its first element should be within the lines of the file, "
            f"[1, {n_lines}], and its second not smaller than its first, or -1."
        )
    return first, n_lines if last == -1 else last


def _edited(path: str, data: bytes, offset: int, n_bytes: int) -> str:
    return f"The file {path} has been edited. {_snippet(path, data, offset, n_bytes)}".rstrip()


def _snippet(path: str, data: bytes, offset: int, n_bytes: int) -> str:
    """Return the lines around some bytes of the file; empty if it is not text, or no longer."""
    try:
        rows = rows_of(as_read(path, data))
    except ToolError:
        return ""
    first, last = line_at(data, offset), line_at(data, offset + n_bytes)
    return (
        "Here's the result of running `cat -n` on a snippet of it:\n"
        f"{numbered(rows, max(1, first - CONTEXT_LINES), last + CONTEXT_LINES)}\n"
        "Review the changes and make sure they are as expected. Edit the file again if necessary."
    )
