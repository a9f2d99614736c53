"""Files in and out of a sandbox. The fork server's child enters the sandbox and reads or writes them.

The policy controls everything that comes out of a sandbox. A folder comes as a tar stream, and unpacking skips entries
that would leave the target.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import posixpath
import shutil
import socket
import tarfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from farm.errors import ToolError
from farm.records.lending.sandbox_calls import FileEntry
from workers.sandboxes.processes.fork_client import fork_client
from workers.sandboxes.processes.sandbox_process import memory_file, refused

if TYPE_CHECKING:
    from workers.sandboxes.isolation.namespaces import JoinTarget
    from workers.sandboxes.isolation.owners.file_owners import CopiedOwners

FILE_S = 60.0
TREE_S = 600.0
REMOVE_S = 0.5
"""Seconds in which a cancelled download is removed; after that the removal continues in the background."""
MAX_FILE = 100_000_000
"""Maximum size in bytes of a file that is read into the worker."""
_REMOVING: set[asyncio.Task[None]] = set()


class Transfer:
    """File transfer of one sandbox. Methods raise SandboxError if it is gone, ToolError if an operation fails."""

    def __init__(self, sandbox_id: str, workdir: str, disk_mb: int) -> None:
        self.sandbox_id = sandbox_id
        self.workdir = workdir
        self._max_tree = disk_mb << 20

    def target(self) -> JoinTarget:
        raise NotImplementedError

    async def read_file(self, path: str) -> bytes:
        return await self._ask_contents("read", path, b"")

    async def write_file(self, path: str, data: bytes) -> None:
        with memory_file(data) as memory:
            await self._ask("write", path, memory, FILE_S)

    async def list_files(self, path: str, depth: int) -> list[FileEntry]:
        """Return the entries of a folder down to a depth, by depth and name; with depth 0, that of the path itself."""
        return [FileEntry(**entry) for entry in json.loads(await self._ask_values("list", path, depth=depth))]

    async def move_file(self, path: str, target: str) -> None:
        """Move a file or folder, creating the parents of its new path."""
        await self._ask_values("move", path, target=target)

    async def remove_file(self, path: str) -> None:
        """Remove a file, or a folder with its contents."""
        await self._ask_values("remove", path)

    async def make_folder(self, path: str) -> None:
        """Create a new folder and its missing parents."""
        await self._ask_values("make_folder", path)

    async def _ask_values(self, action: str, path: str, **values: Any) -> bytes:
        return await self._ask_contents(action, path, json.dumps(values).encode())

    async def _ask_contents(self, action: str, path: str, contents: bytes) -> bytes:
        """Return the contents of a memory file after an action has replaced them."""
        with memory_file(contents) as memory:
            await self._ask(action, path, memory, FILE_S)
            return os.pread(memory, os.fstat(memory).st_size, 0)

    async def upload(self, source: Path, path: str, owners: CopiedOwners | None = None) -> None:
        """Copy a tree from the node into the sandbox."""
        if not await asyncio.to_thread(source.exists):
            raise ToolError(f"{source}: No such file or directory on the node")
        await self._send(partial(_pack, source), path, owners)

    async def download(self, path: str, target: Path) -> None:
        """Copy a tree from the sandbox to the node."""
        if await asyncio.to_thread(os.path.lexists, target):
            raise ToolError(f"{target} exists on the node already")
        ours, theirs = socket.socketpair()
        given_up = threading.Event()
        unpacking = asyncio.create_task(asyncio.to_thread(_unpack, ours, path, target, given_up))
        try:
            with theirs:
                await self._ask("download", path, theirs.fileno(), TREE_S)
        except BaseException:
            # the other side may sleep with its end open
            given_up.set()
            _hang_up(ours)
            removing = asyncio.create_task(_removed(unpacking, target))
            _REMOVING.add(removing)
            removing.add_done_callback(_REMOVING.discard)
            await asyncio.wait([removing], timeout=REMOVE_S)
            raise
        try:
            await unpacking
        except (tarfile.TarError, OSError) as error:
            await asyncio.to_thread(_remove, target)
            raise ToolError(f"{path} cannot be copied out: {error}") from error

    async def unpack(self, archive: BinaryIO, path: str, owners: CopiedOwners | None = None) -> None:
        """Unpack an untrusted tar stream into a folder: no entry can lead out of the sandbox."""
        await self._send(partial(_pass_on, archive), path, owners)

    async def _send(self, write: Callable[[socket.socket], None], path: str, owners: CopiedOwners | None) -> None:
        ours, theirs = socket.socketpair()
        writing = asyncio.create_task(asyncio.to_thread(write, ours))
        try:
            with theirs:
                await self._ask("upload", path, theirs.fileno(), TREE_S, owners)
        finally:
            # if the other side gave up or sleeps, the writer gets an error now
            _hang_up(ours)
            await writing
            ours.close()

    async def pass_on(self, path: str, other: Transfer, target: str, owners: CopiedOwners | None = None) -> None:
        """Copy a tree into another sandbox without a copy on the node. Links are not changed."""
        source, sink = socket.socketpair()
        reading = asyncio.create_task(other._ask("upload", target, sink.fileno(), TREE_S, owners))
        try:
            try:
                await self._ask("download", path, source.fileno(), TREE_S, owners)
            finally:
                # the end of the stream
                _hang_up(source)
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            source.close()
            sink.close()

    async def _ask(
        self, action: str, path: str, descriptor: int, timeout_s: float, owners: CopiedOwners | None = None
    ) -> None:
        if not path or "\0" in path:
            raise ToolError(f"{path!r} is not a valid path")
        job = {
            "do": "files",
            "action": action,
            "path": path,
            "cwd": self.workdir,
            "target": self.target(),
            "owners": owners,
            "max_bytes": MAX_FILE if action in ("read", "list") else self._max_tree,
        }
        answers = fork_client().request(job, [descriptor])
        try:
            async with asyncio.timeout(timeout_s):
                message, _ = await answers.next()
        except TimeoutError:
            raise ToolError(f"{path}: not done within {timeout_s:.0f} s") from None
        finally:
            answers.close()
        if "refused" in message:
            raise ToolError(str(message["refused"]))
        if "done" not in message:
            raise refused(message, self.sandbox_id)


def _hang_up(ours: socket.socket) -> None:
    """Unblock a thread that reads or writes this socket, whatever process holds the other end."""
    # the thread may have closed it itself
    with contextlib.suppress(OSError):
        ours.shutdown(socket.SHUT_RDWR)


def _pass_on(archive: BinaryIO, ours: socket.socket) -> None:
    with contextlib.suppress(OSError, EOFError), ours.makefile("wb") as pipe:
        shutil.copyfileobj(archive, pipe, 1 << 20)
        pipe.flush()
        ours.shutdown(socket.SHUT_WR)


def _pack(source: Path, ours: socket.socket) -> None:
    """Write a tree as a tar stream, owned by root, without file types that a sandbox cannot create."""

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        member.name = member.name.removeprefix("./") or "."
        return member

    try:
        with (
            ours.makefile("wb") as pipe,
            tarfile.open(fileobj=pipe, mode="w|", format=tarfile.PAX_FORMAT) as archive,
        ):
            archive.add(source.resolve(), ".", filter=owned)
    except (BrokenPipeError, ConnectionResetError):
        # the other side has reported the reason
        return
    # end of the stream; the other side has not reported its result yet
    with contextlib.suppress(OSError):
        ours.shutdown(socket.SHUT_WR)


async def _removed(unpacking: asyncio.Task[None], target: Path) -> None:
    await asyncio.gather(unpacking, return_exceptions=True)
    await asyncio.to_thread(_remove, target)


def _unpack(ours: socket.socket, source: str, target: Path, given_up: threading.Event) -> None:
    """Create `target` from a tar stream of `source`, skipping entries that lead outside. Raises TarError, OSError."""
    top = target.parent.resolve() / target.name
    # folders created here: everything below them was created here, too
    folders: set[str] = set()
    with ours, ours.makefile("rb", 1 << 18) as pipe:
        try:
            with tarfile.open(fileobj=pipe, mode="r|") as archive:
                for member in archive:
                    if given_up.is_set():
                        return
                    _write_member(archive, member, source, str(top), folders)
        except tarfile.ReadError:
            # the stream is empty: the other side has reported the reason
            if target.exists():
                raise
        while pipe.read(1 << 20):
            pass
    while _cut_links(top):
        pass


def _write_member(archive: tarfile.TarFile, member: tarfile.TarInfo, source: str, top: str, folders: set[str]) -> None:
    path = top if member.name == "." else f"{top}/{member.name}"
    # the tree can change while it is packed, so that an earlier folder is a link here
    if path != top and path.rpartition("/")[0] not in folders:
        return
    if path.rpartition("/")[2] in ("", ".", ".."):
        return
    if member.isdir():
        os.mkdir(path)  # noqa: PTH102 - tens of thousands, for which pathlib takes as long as the kernel
        folders.add(path)
    elif member.isreg():
        data = archive.extractfile(member)
        assert data
        mode = member.mode & 0o700 | 0o600
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            shutil.copyfileobj(data, file, 1 << 20)
            os.fchmod(descriptor, mode)
    elif member.issym() and path != top:
        Path(path).symlink_to(_within(member, source))
    elif member.islnk() and f"{top}/{member.linkname}".rpartition("/")[0] in folders:
        os.link(f"{top}/{member.linkname}", path, follow_symlinks=False)


def _within(link: tarfile.TarInfo, source: str) -> str:
    """Return the target of a link in a copy of `source`: absolute paths below `source` become relative to the link."""
    folder = source.rstrip("/")
    if not source.startswith("/") or not f"{link.linkname}/".startswith(f"{folder}/"):
        return link.linkname
    inside = posixpath.relpath(link.linkname, folder or "/")
    return posixpath.relpath(inside, posixpath.dirname(link.name) or ".")


def _cut_links(top: Path) -> int:
    """Remove links that lead out of a tree and return their number. Removing one can change where others lead."""
    n_cut = 0
    for folder, folders, files in os.walk(top):
        for path in (Path(folder, name) for name in (*folders, *files)):
            if path.is_symlink() and not _stays(path, top):
                path.unlink()
                n_cut += 1
    return n_cut


def _stays(link: Path, top: Path) -> bool:
    try:
        return not link.readlink().is_absolute() and link.resolve().is_relative_to(top)
    except (OSError, RuntimeError):
        return False


def _remove(target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target, ignore_errors=True)
    else:
        target.unlink(missing_ok=True)
