"""Files in and out of a sandbox: requested from the fork server, whose child goes inside for them.

What comes out of a sandbox is what the policy made of it. A folder comes as a tar stream, which is unpacked here with
nothing that leads out of its place.
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from farm.errors import ToolError
from farm.records.lending.sandbox_calls import FileEntry
from workers.sandboxes.processes.fork_client import fork_client
from workers.sandboxes.processes.sandbox_process import refused

if TYPE_CHECKING:
    from workers.sandboxes.isolation.namespaces import JoinTarget
    from workers.sandboxes.isolation.owners.file_owners import CopiedOwners

FILE_S = 60.0
TREE_S = 600.0
REMOVE_S = 0.5
"""Seconds for a cancelled copy out to be removed; after that it goes on without being waited for."""
MAX_FILE = 100_000_000
"""Bytes of a file that is read into the worker."""


_REMOVING: set[asyncio.Task[None]] = set()


class Transfer:
    """Of one sandbox. Every method raises SandboxError if it is gone, ToolError if the file cannot be had."""

    def __init__(self, sandbox_id: str, target: Callable[[], JoinTarget], workdir: str, disk_mb: int) -> None:
        self._sandbox_id = sandbox_id
        self._target = target
        self._workdir = workdir
        self._max_tree = disk_mb << 20

    async def read(self, path: str) -> bytes:
        """A file's contents."""
        memory = os.memfd_create("file")
        try:
            await self._ask("read", path, memory, FILE_S)
            return os.pread(memory, os.fstat(memory).st_size, 0)
        finally:
            os.close(memory)

    async def write(self, path: str, data: bytes) -> None:
        """Make or replace a file."""
        memory = os.memfd_create("file")
        try:
            with open(memory, "wb", closefd=False) as file:  # noqa: ASYNC230 - in memory
                file.write(data)
            await self._ask("write", path, memory, FILE_S)
        finally:
            os.close(memory)

    async def entries(self, path: str, depth: int) -> list[FileEntry]:
        """The entries of a folder, down to a depth of folders, in order of depth and name; of depth 0, its own."""
        return [FileEntry(**entry) for entry in json.loads(await self._told("list", path, {"depth": depth}))]

    async def move(self, path: str, target: str) -> None:
        """Move a file or a folder, making the folders above its new path."""
        await self._told("move", path, {"target": target})

    async def remove(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it."""
        await self._told("remove", path, {})

    async def make_folder(self, path: str) -> None:
        """Make a folder that is not there yet, and those above it."""
        await self._told("make_folder", path, {})

    async def _told(self, action: str, path: str, values: Mapping[str, Any]) -> bytes:
        """Return what an action leaves in a memory file that had these values."""
        memory = os.memfd_create("files")
        try:
            os.pwrite(memory, json.dumps(values).encode(), 0)
            await self._ask(action, path, memory, FILE_S)
            return os.pread(memory, os.fstat(memory).st_size, 0)
        finally:
            os.close(memory)

    async def upload(self, source: Path, path: str, owners: CopiedOwners | None = None) -> None:
        """Copy a tree of the node in."""
        if not await asyncio.to_thread(source.exists):
            raise ToolError(f"{source}: No such file or directory on the node")
        ours, theirs = socket.socketpair()
        packing = asyncio.create_task(asyncio.to_thread(_pack, source, ours))
        try:
            with theirs:
                await self._ask("upload", path, theirs.fileno(), TREE_S, owners)
        finally:
            # if the other side gave up, or sleeps, the writer gets an error now
            _hang_up(ours)
            await packing
            ours.close()

    async def download(self, path: str, target: Path) -> None:
        """Copy a tree of the sandbox out."""
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
        """Unpack a tar stream into a folder, whatever is in it: nothing can lead out of the sandbox."""
        ours, theirs = socket.socketpair()
        sending = asyncio.create_task(asyncio.to_thread(_send, archive, ours))
        try:
            with theirs:
                await self._ask("upload", path, theirs.fileno(), TREE_S, owners)
        finally:
            _hang_up(ours)
            await sending
            ours.close()

    async def pass_on(self, path: str, other: Transfer, target: str, owners: CopiedOwners | None = None) -> None:
        """Copy a tree into another sandbox, without its passing through the node's files: links stay as they are."""
        source, sink = socket.socketpair()
        reading = asyncio.create_task(other._ask("upload", target, sink.fileno(), TREE_S, owners))
        try:
            try:
                await self._ask("download", path, source.fileno(), TREE_S, owners)
            finally:
                # that is all
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
            raise ToolError(f"{path!r} is no path")
        job = {
            "do": "files",
            "action": action,
            "path": path,
            "cwd": self._workdir,
            "target": self._target(),
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
            raise refused(message, self._sandbox_id)


def _hang_up(ours: socket.socket) -> None:
    """End what a thread reads or writes there, whatever holds the other end."""
    # it may have done so itself
    with contextlib.suppress(OSError):
        ours.shutdown(socket.SHUT_RDWR)


def _send(archive: BinaryIO, ours: socket.socket) -> None:
    with contextlib.suppress(OSError, EOFError), ours.makefile("wb") as pipe:
        shutil.copyfileobj(archive, pipe, 1 << 20)
        pipe.flush()
        ours.shutdown(socket.SHUT_WR)


def _pack(source: Path, ours: socket.socket) -> None:
    """Write a tree as a tar stream; owned by root, and without what a sandbox cannot make."""

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
        # the other side has said why
        return
    # that is all; the other side has not said yet what it makes of it
    with contextlib.suppress(OSError):
        ours.shutdown(socket.SHUT_WR)


async def _removed(unpacking: asyncio.Task[None], target: Path) -> None:
    await asyncio.gather(unpacking, return_exceptions=True)
    await asyncio.to_thread(_remove, target)


def _unpack(ours: socket.socket, source: str, target: Path, given_up: threading.Event) -> None:
    """Make `target` from a tar stream of `source`; leaves out what would lead out of it. Raises TarError, OSError."""
    top = target.parent.resolve() / target.name
    # the folders that are made here, below which there is nothing but what is made here
    folders: set[str] = set()
    with ours, ours.makefile("rb", 1 << 18) as pipe:
        try:
            with tarfile.open(fileobj=pipe, mode="r|") as archive:
                for member in archive:
                    if given_up.is_set():
                        return
                    _place(archive, member, source, str(top), folders)
        except tarfile.ReadError:
            # nothing came: the other side has said why
            if target.exists():
                raise
        while pipe.read(1 << 20):
            pass
    while _cut_links(top):
        pass


def _place(archive: tarfile.TarFile, member: tarfile.TarInfo, source: str, top: str, folders: set[str]) -> None:
    path = top if member.name == "." else f"{top}/{member.name}"
    # the tree may have changed while it was packed, so that what was a folder first is a link here
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
    """Return the target of a link in a copy of `source`: relative to the link, if it is a whole path below `source`."""
    folder = source.rstrip("/")
    if not source.startswith("/") or not f"{link.linkname}/".startswith(f"{folder}/"):
        return link.linkname
    inside = posixpath.relpath(link.linkname, folder or "/")
    return posixpath.relpath(inside, posixpath.dirname(link.name) or ".")


def _cut_links(top: Path) -> int:
    """Remove links that lead out of a tree, and say how many; without them, others may lead elsewhere."""
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
