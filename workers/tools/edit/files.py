"""The files of a sandbox for the `edit` tool: contents as bytes and as text, listing, changing, and undoing changes.

The sandbox's errors about paths get the wording of common editor tools. If all lines of a file end in CR LF, the model
reads and writes LF, and the file keeps CR LF. The undo history stores the removed bytes, not copies of the files.
Excerpts are numbered as by `cat -n`.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice

from farm.errors import ToolError
from workers.plugins.interfaces import ExecResult, Sandbox
from workers.tools import lines

# A link's target was created, not the link; the x keeps line breaks at the end of a name.
_REMOVE = 'file=$(readlink -f -- "$0" && echo x) || exit; exec rm -f -- "${file%??}"'
_REMOVE_S = 30.0

MAX_CHANGES = 200
MAX_BYTES = 4_000_000
"""Maximum removed bytes kept for all files of a rollout: a node runs hundreds of rollouts."""

MAX_FILE_BYTES = 5_000_000
"""Maximum size of a file: a larger one would block the worker's event loop for a tenth of a second or more."""
MAX_LINE_NUMBERS = 20

MAX_SHOWN_CHARS = 14_000
"""Slightly below the agent's default limit of an observation, beyond which it cuts out the middle."""
MAX_ROW_CHARS = 2_000

_MAX_CHARS = 200_000
"""Maximum length of a file that is searched again: the worker serves other rollouts too."""

_NUMBERED = re.compile(r"^ *\d+\t")


class IsFolder(ToolError):
    """The path is a folder."""


class NoSuchFile(ToolError):
    """There is nothing at the path."""


class Files:
    """The files of one rollout; keeps the text that its changes removed, within limits."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._history = History()

    async def read(self, path: str) -> bytes:
        """Return a file's contents. Raises ToolError: IsFolder or NoSuchFile if applicable."""
        try:
            return await self._sandbox.read_file(path)
        except ToolError as error:
            raise _worded(error, path) from None

    async def create(self, path: str, new: bytes) -> None:
        """Write a whole file, replacing one that exists."""
        try:
            old = await self.read(path)
        except NoSuchFile:
            await self._write(path, new, None)
            self._history.add(Change(path, 0, None, len(new), digest(new)))
        except IsFolder:
            raise
        except ToolError:
            await self._write(path, new, None)
            self._history.forget(path)  # The old contents could not be read, so they cannot be restored.
        else:
            await self.splice(path, old, 0, len(old), new)

    async def splice(self, path: str, data: bytes, offset: int, n_removed: int, new: bytes) -> bytes:
        """Replace some bytes of the file by `new`, keeping the old ones for undo; return the changed file."""
        changed = data[:offset] + new + data[offset + n_removed :]
        await self._write(path, changed, data)
        removed = data[offset : offset + n_removed]
        self._history.add(Change(path, offset, removed, len(new), digest(changed)))
        return changed

    async def undo(self, path: str) -> tuple[Change, bytes]:
        """Undo the last change of a file; return it and the restored contents, empty if the file is removed."""
        change = self._history.last(path)
        if change is None:
            raise ToolError(f"No edit history found for {path}.")
        data = await self.read(path)
        if not change.left(data):
            raise ToolError(
                f"The last edit to {path} was not undone: something else has changed the file since, which would be "
                "lost. Look at it with `view` and change it with `str_replace`."
            )
        restored = change.undone(data)
        if change.removed is None:
            result = await self._sandbox.exec(["bash", "-c", _REMOVE, path], timeout_s=_REMOVE_S)
            if result.code != 0:
                raise ToolError(f"The last edit to {path} was not undone: {_reason(result)}")
        else:
            await self._write(path, restored, data)
        self._history.drop(change)
        return change, restored

    async def listing(self, path: str, timeout_s: float) -> str:
        """Return the contents of a folder, two levels deep; one level if that is too much to show."""
        levels = "up to 2 levels deep"
        shown, n_left_out = listed(await self._names(path, 2, timeout_s))
        if n_left_out:
            levels = "1 level deep (the next is too long to show)"
            shown, n_left_out = listed(await self._names(path, 1, timeout_s))
        head = f"Here's the files and directories {levels} in {path}, excluding hidden items:"
        note = f"[{n_left_out} more are left out; see them with another tool.]" if n_left_out else ""
        return lines(head, path, shown, note)

    async def _names(self, path: str, depth: int, timeout_s: float) -> list[str]:
        script = files("workers.tools.edit").joinpath("list_folder.sh").read_text()
        result = await self._sandbox.exec(["bash", "-c", script, path, str(depth)], timeout_s=timeout_s)
        if result.timed_out or (result.code != 0 and not result.stdout):
            raise ToolError(f"{path} cannot be listed: {_reason(result)}")
        return sorted(result.stdout.decode(errors="replace").split("\0")[:-1])

    async def _write(self, path: str, data: bytes, before: bytes | None) -> None:
        try:
            await self._sandbox.write_file(path, data)
        except ToolError as error:
            if before is not None:  # A full disk may have truncated the file.
                with contextlib.suppress(ToolError):
                    await self._sandbox.write_file(path, before)
            raise _worded(error, path) from None


def _reason(result: ExecResult) -> str:
    if result.timed_out:
        return "it took too long"
    return quoted(result.stderr.decode(errors="replace").strip()) or f"exit code {result.code}"


def _worded(error: ToolError, path: str) -> ToolError:
    message = str(error)
    if message.endswith(os.strerror(errno.ENOENT)):
        return NoSuchFile(f"The path {path} does not exist. Please provide a valid path.")
    if message.endswith(os.strerror(errno.EISDIR)):
        return IsFolder(f"The path {path} is a directory and only the `view` command can be used on directories.")
    if message.endswith((os.strerror(errno.ENOTDIR), os.strerror(errno.EEXIST))):
        return ToolError(
            f"The path {path} leads through a file as if it were a directory. Please provide a valid path."
        )
    return error


@dataclass(frozen=True, slots=True)
class Change:
    """A change: `removed` are the old bytes at `offset`, None if there was no file; `n_inserted` bytes replace them."""

    path: str
    offset: int
    removed: bytes | None
    n_inserted: int
    after: bytes
    """The digest of the file after the change: a different one means that another program wrote to it."""

    def left(self, data: bytes) -> bool:
        """Return whether this is the file as the change left it."""
        return digest(data) == self.after

    def undone(self, data: bytes) -> bytes:
        """Return the file before the change; `data` must be the file as the change left it."""
        return data[: self.offset] + (self.removed or b"") + data[self.offset + self.n_inserted :]


class History:
    """The latest changes of all files; beyond the limits the oldest are dropped."""

    def __init__(self, max_changes: int = MAX_CHANGES, max_bytes: int = MAX_BYTES) -> None:
        self._max_changes = max_changes
        self._max_bytes = max_bytes
        self._changes: list[Change] = []

    def add(self, change: Change) -> None:
        """Add a change; one that exceeds the limits drops its file's history instead."""
        if len(change.removed or b"") > self._max_bytes:
            self.forget(change.path)
            return
        self._changes.append(change)
        while len(self._changes) > self._max_changes or self.n_bytes > self._max_bytes:
            del self._changes[0]

    def last(self, path: str) -> Change | None:
        """Return the latest change of a file that is not undone, if it is still held."""
        return next((change for change in reversed(self._changes) if _same(change.path, path)), None)

    def drop(self, change: Change) -> None:
        """Drop a change that was undone."""
        self._changes.remove(change)

    def forget(self, path: str) -> None:
        """Drop all changes of a file whose latest change cannot be undone: then the earlier ones cannot be either."""
        self._changes = [change for change in self._changes if not _same(change.path, path)]

    @property
    def n_bytes(self) -> int:
        return sum(len(change.removed or b"") for change in self._changes)


def digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _same(path: str, other: str) -> bool:
    # POSIX keeps two slashes at the beginning of a path.
    return posixpath.normpath(path).lstrip("/") == posixpath.normpath(other).lstrip("/")


def as_read(path: str, data: bytes) -> str:
    """Return the text that the model reads. Raises ToolError if the data is not text, or too large."""
    if len(data) > MAX_FILE_BYTES:
        raise ToolError(
            f"{path} has {len(data)} bytes, more than the {MAX_FILE_BYTES} that this tool handles; look at a part of "
            "it with another one."
        )
    if b"\0" in data:
        raise ToolError(f"{path} is a binary file, not a text file; use another tool for it.")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ToolError(
            f"{path} is not a text file in UTF-8: it has the byte {data[error.start]:#04x} in line {line}. Convert it "
            "first, or use another tool for it."
        ) from None
    return text.replace("\r\n", "\n") if line_end(data) == b"\r\n" else text


def as_kept(text: str, end: bytes) -> bytes:
    """Return the model's text as bytes, with the line ends of the file."""
    data = text.encode()
    return data.replace(b"\r\n", b"\n").replace(b"\n", end) if end == b"\r\n" else data


def line_end(data: bytes) -> bytes:
    n_ends = data.count(b"\n")
    return b"\r\n" if n_ends and data.count(b"\r\n") == n_ends else b"\n"


def line_at(data: bytes, offset: int) -> int:
    return data.count(b"\n", 0, offset) + 1


def end_of_line(data: bytes, line: int) -> int:
    """Return the offset of the line after this one; the end of the file if there is none."""
    return len(data) - len(data.split(b"\n", line)[line]) if line <= data.count(b"\n") else len(data)


def lines_of(data: bytes, part: bytes) -> str:
    """Return the numbers of the lines that contain `part`, as a list; of many only the first."""
    numbers: list[int] = []
    at, counted, line = data.find(part), 0, 1
    while at >= 0 and len(numbers) < MAX_LINE_NUMBERS:
        line += data.count(b"\n", counted, at)
        counted = at
        numbers.append(line)
        at = data.find(part, at + 1)
    return f"{numbers} and more" if at >= 0 else str(numbers)


def rows_of(text: str) -> list[str]:
    """Return the lines of a text as editors count them: text after the last line break is one unless empty."""
    rows = text.split("\n")
    if not rows[-1]:
        rows.pop()
    return rows


def numbered(rows: Sequence[str], first: int, last: int) -> str:
    """Return lines `first` to `last`, counted from 1; if they are too many, a note says which are omitted."""
    last = min(last, len(rows))
    shown: list[str] = []
    n_chars = 0
    for number in range(first, last + 1):
        row = f"{number:6}\t{_cut(rows[number - 1])}"
        n_chars += len(row) + 1
        if n_chars > MAX_SHOWN_CHARS:
            return "\n".join([*shown, f"[Lines {number} to {last} are left out; see them with `view_range`.]"])
        shown.append(row)
    return "\n".join(shown)


def listed(names: Sequence[str]) -> tuple[str, int]:
    """Return names, one per line, and the number of omitted ones if they are too many."""
    shown: list[str] = []
    n_chars = 0
    for name in names:
        row = name if name.isprintable() else json.dumps(name)  # It may contain line breaks.
        n_chars += len(row) + 1
        if n_chars > MAX_SHOWN_CHARS:
            break
        shown.append(row)
    return "\n".join(shown), len(names) - len(shown)


def quoted(text: str) -> str:
    """Return a text as part of a message, truncated if long."""
    return text if len(text) <= MAX_ROW_CHARS else text[:MAX_ROW_CHARS] + "..."


def _cut(row: str) -> str:
    if len(row) <= MAX_ROW_CHARS:
        return row
    return f"{row[:MAX_ROW_CHARS]}[... {len(row) - MAX_ROW_CHARS} more characters in this line]"


def explained(text: str, old: str) -> str:
    """Return a sentence on the difference; empty if no likely one is found."""
    if max(len(text), len(old)) > _MAX_CHARS:
        return ""
    if _without_numbers(old) in text and _without_numbers(old) != old:
        return "`old_str` has the line numbers that `view` puts before each line: leave them and the tab out."
    if old.replace("\r\n", "\n") in text.replace("\r\n", "\n"):
        ends = r"some lines of the file end in \r\n" if "\r\n" in text else r"the lines of the file end only in \n"
        return f"Only line breaks differ: {ends}. Write them in `old_str` as they are."
    if span := _but_for_blanks(text, old):
        shown = numbered(rows_of(text), *span)
        return f"Only blanks or line breaks differ from lines {span[0]} to {span[1]}, which are:\n{shown}"
    return ""


def _without_numbers(old: str) -> str:
    """Return `old` without the number and tab before each line; unchanged if a line has none."""
    rows = old.split("\n")
    if not all(_NUMBERED.match(row) for row in rows if row.strip()):
        return old
    return "\n".join(_NUMBERED.sub("", row) for row in rows)


def _but_for_blanks(text: str, old: str) -> tuple[int, int] | None:
    """Return the first and last line of `old` in the text, with runs of blanks counted as one; None if absent."""
    wanted, squeezed = " ".join(old.split()), " ".join(text.split())
    at = squeezed.find(wanted) if wanted else -1
    if at < 0:
        return None
    first = squeezed.count(" ", 0, at)
    last = first + wanted.count(" ")
    words = list(islice(re.finditer(r"\S+", text), first, last + 1))
    return text.count("\n", 0, words[0].start()) + 1, text.count("\n", 0, words[-1].start()) + 1
