"""The `edit` tool: view and change files by exact text, worded as models know it from `str_replace_based_edit_tool`."""

from __future__ import annotations

import posixpath
from typing import ClassVar, Literal, TypeVar

from pydantic import BaseModel, Field

from farm.errors import ToolError
from workers.interfaces import Observation, Sandbox
from workers.tools import needed

_Value = TypeVar("_Value")

CONTEXT_LINES = 4
LIST_DEPTH = 2


class EditArguments(BaseModel):
    command: Literal["view", "create", "str_replace", "insert"] = Field(description="What to do.")
    path: str = Field(description="Absolute path of a file, or of a folder to view, such as `/workspace/a.py`.")
    view_range: tuple[int, int] | None = Field(
        default=None, description="For `view` of a file: first and last line to show, from 1; -1 is the end."
    )
    file_text: str | None = Field(default=None, description="For `create`: the contents of the file.")
    old_str: str | None = Field(
        default=None, description="For `str_replace`: the text to replace; must occur exactly once, blanks included."
    )
    new_str: str | None = Field(default=None, description="For `str_replace`: what replaces it; nothing by default.")
    insert_line: int | None = Field(default=None, description="For `insert`: the line after which; 0 is the top.")
    insert_text: str | None = Field(default=None, description="For `insert`: the text to insert.")


class EditTool:
    """See `workers.interfaces.Tool`. Keeps nothing between calls."""

    name: ClassVar[str] = "edit"
    description: ClassVar[str] = (
        "View, create and edit files. `view` shows a file with line numbers, or a folder, two levels deep. "
        "`create` writes a file, replacing one that exists. `str_replace` replaces `old_str`, which must occur exactly "
        "once in the file. `insert` puts text after a line."
    )
    arguments: ClassVar[type[BaseModel]] = EditArguments

    def __init__(self, sandbox: Sandbox | None) -> None:
        self._sandbox = sandbox

    async def call(self, arguments: EditArguments, timeout_s: float) -> Observation:
        """What was done, with the lines around it. ToolError says what the model must change."""
        sandbox = needed(self._sandbox, self.name)
        if not arguments.path.startswith("/"):
            raise ToolError(
                f"The path {arguments.path} is not an absolute path, it should start with `/`. "
                f"Maybe you meant {posixpath.join('/', arguments.path)}?"
            )
        return Observation(await _DO[arguments.command](sandbox, arguments, timeout_s))

    async def close(self) -> None:
        """Nothing is held."""


async def _view(sandbox: Sandbox, arguments: EditArguments, timeout_s: float) -> str:
    path = arguments.path
    if (await sandbox.exec(["test", "-d", path], timeout_s=timeout_s)).code == 0:
        if arguments.view_range is not None:
            raise ToolError("The `view_range` parameter is not allowed when `path` points to a directory.")
        return await _listing(sandbox, path, timeout_s)
    rows = (await _read(sandbox, path)).split("\n")
    first, last = arguments.view_range or (1, -1)
    if not 1 <= first <= len(rows) or not (last == -1 or first <= last):
        raise ToolError(
            f"Invalid `view_range`: [{first}, {last}]. Its first element should be within the lines of the file, "
            f"[1, {len(rows)}], and its second not smaller than its first, or -1."
        )
    shown = rows[first - 1 : None if last == -1 else last]
    return f"Here's the result of running `cat -n` on {path}:\n" + _numbered(shown, first)


async def _listing(sandbox: Sandbox, path: str, timeout_s: float) -> str:
    command = ["find", path, "-maxdepth", str(LIST_DEPTH), "-not", "-path", "*/.*"]
    result = await sandbox.exec(command, timeout_s=timeout_s)
    names = sorted(result.stdout.decode(errors="replace").splitlines())
    return f"Here's the files and directories up to 2 levels deep in {path}, excluding hidden items:\n" + "\n".join(
        names
    )


async def _create(sandbox: Sandbox, arguments: EditArguments, timeout_s: float) -> str:
    text = _given(arguments.file_text, "file_text", "create")
    await _write(sandbox, arguments.path, text)
    return f"File created successfully at: {arguments.path}"


async def _str_replace(sandbox: Sandbox, arguments: EditArguments, timeout_s: float) -> str:
    path, old, new = arguments.path, _given(arguments.old_str, "old_str", "str_replace"), arguments.new_str or ""
    text = await _read(sandbox, path)
    n_found = text.count(old) if old else 0
    if n_found == 0:
        raise ToolError(f"No replacement was performed, old_str `{old}` did not appear verbatim in {path}.")
    if n_found > 1:
        raise ToolError(
            f"No replacement was performed. Multiple occurrences of old_str `{old}` in lines {_lines_of(text, old)}. "
            "Please ensure it is unique."
        )
    if old == new:
        raise ToolError("No replacement was performed, as old_str and new_str are the same.")
    changed = text.replace(old, new)
    await _write(sandbox, path, changed)
    return _edited(path, changed, text[: text.index(old)].count("\n"), new.count("\n") + 1)


async def _insert(sandbox: Sandbox, arguments: EditArguments, timeout_s: float) -> str:
    path, new = arguments.path, _given(arguments.insert_text, "insert_text", "insert")
    line = _given(arguments.insert_line, "insert_line", "insert")
    text = await _read(sandbox, path)
    rows = text.splitlines(keepends=True)
    if not 0 <= line <= len(rows):
        raise ToolError(
            f"Invalid `insert_line` parameter: {line}. It should be within the range of lines of the file: "
            f"[0, {len(rows)}]."
        )
    if line and not rows[line - 1].endswith("\n"):
        rows[line - 1] += "\n"
    if not new.endswith("\n"):
        new += "\n"
    changed = "".join([*rows[:line], new, *rows[line:]])
    await _write(sandbox, path, changed)
    return _edited(path, changed, line, new.count("\n"))


_DO = {"view": _view, "create": _create, "str_replace": _str_replace, "insert": _insert}


def _given(value: _Value | None, name: str, command: str) -> _Value:
    if value is None:
        raise ToolError(f"Parameter `{name}` is required for command: {command}.")
    return value


async def _read(sandbox: Sandbox, path: str) -> str:
    data = await sandbox.read_file(path)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ToolError(f"{path} is not a text file in UTF-8; use another tool for it.") from None


async def _write(sandbox: Sandbox, path: str, text: str) -> None:
    await sandbox.write_file(path, text.encode("utf-8", "replace"))


def _lines_of(text: str, part: str) -> list[int]:
    numbers, start = [], text.find(part)
    while start >= 0:
        numbers.append(text.count("\n", 0, start) + 1)
        start = text.find(part, start + 1)
    return numbers


def _edited(path: str, text: str, first: int, n_lines: int) -> str:
    start = max(0, first - CONTEXT_LINES)
    rows = text.split("\n")[start : first + n_lines + CONTEXT_LINES]
    return (
        f"The file {path} has been edited. Here's the result of running `cat -n` on a snippet of it:\n"
        f"{_numbered(rows, start + 1)}\n"
        "Review the changes and make sure they are as expected. Edit the file again if necessary."
    )


def _numbered(rows: list[str], first: int) -> str:
    return "\n".join(f"{number:6}\t{row}" for number, row in enumerate(rows, start=first))
