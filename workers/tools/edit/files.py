"""The files of a sandbox for the `edit` tool: reading, listing, changing, and undoing changes.

The sandbox's errors about paths get the wording of common editor tools.
"""

from __future__ import annotations

import contextlib
import errno
import os
from importlib.resources import files

from farm.errors import ToolError
from workers.plugins.interfaces import ExecResult, Sandbox
from workers.tools import lines
from workers.tools.edit.excerpt import listed, quoted
from workers.tools.edit.history import Change, History, digest

# A link's target was created, not the link; the x keeps line breaks at the end of a name.
_REMOVE = 'file=$(readlink -f -- "$0" && echo x) || exit; exec rm -f -- "${file%??}"'
_REMOVE_S = 30.0


def _listing() -> str:
    return files("workers.tools.edit").joinpath("list_folder.sh").read_text()


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
            await self._remove(path)
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
        result = await self._sandbox.exec(["bash", "-c", _listing(), path, str(depth)], timeout_s=timeout_s)
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

    async def _remove(self, path: str) -> None:
        result = await self._sandbox.exec(["bash", "-c", _REMOVE, path], timeout_s=_REMOVE_S)
        if result.code != 0:
            raise ToolError(f"The last edit to {path} was not undone: {_reason(result)}")


def _reason(result: ExecResult) -> str:
    if result.timed_out:
        return "it took too long"
    return quoted(result.stderr.decode(errors="replace").strip()) or f"exit code {result.code}"


def _worded(error: ToolError, path: str) -> ToolError:
    """Return the error in the wording of editor tools, by the system's message at the end of the sandbox's."""
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
