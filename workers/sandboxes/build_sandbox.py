"""A sandbox for one build step of a Dockerfile. Its changes become a layer, then it is stopped."""

from __future__ import annotations

import asyncio
import bz2
import gzip
import lzma
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar

from farm.errors import ToolError
from farm.records.request import SandboxLimits, SandboxSpec
from workers.sandboxes.images.building.builder import move_tree
from workers.sandboxes.images.layered_image import Image
from workers.sandboxes.lifecycle import layers
from workers.sandboxes.lifecycle.left_layers import settle_owners
from workers.sandboxes.processes.process_tree import MARK, kill_tagged, new_tag
from workers.sandboxes.processes.sandbox_process import Collector, memory_file
from workers.sandboxes.remove_tree import remove
from workers.sandboxes.sandbox import NodeSandbox

T = TypeVar("T")

MAX_OUTPUT = 1_000_000
"""Maximum size of a program's output that is kept, in bytes."""
LIMITS = SandboxLimits(memory_mb=8192, n_processes=4096, disk_mb=65_536, cpu_s=14_400, n_files=65_536, file_mb=32_768)
_COMPRESSED: Sequence[tuple[bytes, Callable[..., Any]]] = (
    (b"\x1f\x8b", gzip.open),
    (b"BZh", bz2.open),
    (b"\xfd7zXZ", lzma.open),
)


def build_spec(network: bool) -> SandboxSpec:
    """Return the spec of build sandboxes: with users, and with network if builds may use it."""
    return SandboxSpec(workdir="/", limits=LIMITS, network=network, fake_root=True)


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """The end of a program: its exit code, None if it was killed at its time limit; and both outputs in order."""

    code: int | None
    output: str
    limit: str = ""


Owner: TypeAlias = tuple[int, int]
"""A user and a group by number, recorded as a file's owner."""


class BuildSandbox:
    """A sandbox on an image for one step. All methods block; ToolError for a file, SandboxError if it is gone.

    It is `bare` if its image has no programs yet, so that nothing can be run in it.
    """

    def __init__(self, sandbox: NodeSandbox, *, bare: bool = False) -> None:
        self._sandbox = sandbox
        self.bare = bare

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        identity: tuple[int, int] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
    ) -> ProgramEnd:
        """Run a program as root, or as the user and group of `identity`, with only these environment variables."""
        self._sandbox.identity = identity or (0, 0)
        try:
            return _done(self._run(argv, env or {}, cwd, stdin, timeout_s))
        finally:
            self._sandbox.identity = (0, 0)

    async def _run(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: str, stdin: bytes, timeout_s: float
    ) -> ProgramEnd:
        notices, mark = self._sandbox.notices(), new_tag()
        with memory_file(stdin) as memory, closing(Collector(MAX_OUTPUT, last=True)) as output:
            everything = {**self._sandbox.environment(), **env, MARK: mark}
            fds = {0: memory, 1: output.write_end, 2: output.write_end}
            with closing(await self._sandbox.start(argv, env=everything, fds=fds, cwd=cwd)) as child:
                output.close_write_end()
                code = await child.wait_within(timeout_s)
                if code is None:
                    child.kill()
                    await asyncio.to_thread(kill_tagged, mark)
                return ProgramEnd(code, output.finish().decode(errors="replace"), notices.take(code))

    def is_folder(self, path: str) -> bool:
        """Return whether a path is a folder, or a link to one."""
        if not self.bare:
            return self.run(["bash", "-c", '[ -d "$1" ]', "bash", path]).code == 0
        return self._can_list(path, 1)

    def has(self, path: str) -> bool:
        """Return whether a file, folder or link exists at a path."""
        return self._can_list(path, 0)

    def _can_list(self, path: str, depth: int) -> bool:
        try:
            _done(self._sandbox.list_files(path, depth))
        except ToolError:
            return False
        return True

    def read_file(self, path: str) -> bytes:
        return _done(self._sandbox.read_file(path))

    def make_folder(self, path: str, mode: int) -> None:
        """Create a folder with this mode, and its missing parents, unless it exists."""
        if self.is_folder(path):
            return
        with tempfile.TemporaryDirectory() as name:
            empty = Path(name, "folder")
            empty.mkdir(mode=0o755)
            empty.chmod(mode)
            _done(self._sandbox.upload(empty, path))

    def upload(self, source: Path, path: str, owner: Owner | None = None) -> None:
        """Copy a file, or the contents of a folder, from the node; owned by `owner`, else by root."""
        _done(self._sandbox.upload(source, path, {"each": owner or (0, 0), "whole": False}))

    def unpack(self, archive: Path, path: str, owner: Owner | None = None) -> None:
        """Unpack a tar file of the node, compressed or not, into a folder.

        Its files belong to `owner`, else to the owners in the archive.
        """
        with opened(archive) as stream:
            _done(self._sandbox.unpack(stream, path, {"each": owner, "whole": False}))

    def copy_from(
        self, other: BuildSandbox, source: str, path: str, owner: Owner | None = None, *, whole: bool = False
    ) -> None:
        """Copy a file, or the contents of a folder, from another one; links are not changed.

        All files belong to `owner`, else they keep their owners. If the folder at `path` and its parents are created,
        they belong to `owner`, else to root; a folder that is copied `whole` also keeps its mode and owner.
        """
        _done(other._sandbox.pass_on(source, self._sandbox, path, {"each": owner, "whole": whole}))

    def finish(self, target: Path, owner: Owner | None = None) -> None:
        """End it and move its changes to a folder that does not exist yet; new files belong to `owner`."""
        taken = layers.detach(self._sandbox.config, self._sandbox.folder)
        try:
            self.stop()
            if owner:
                settle_owners(self._sandbox.config, layers.files_of(taken), owner, self._sandbox.users.lower)
            move_tree(layers.files_of(taken), target)
        finally:
            remove(taken)

    def stop(self) -> None:
        """End it; harmless when repeated."""
        self._sandbox.end()


StartBuild: TypeAlias = Callable[[Image], BuildSandbox]
"""Starts a new sandbox on an image. Raises SandboxError."""


def opened(archive: Path) -> BinaryIO:
    """Return the tar stream of a file that may be compressed. Raises OSError."""
    with archive.open("rb") as file:
        start = file.read(6)
    opener = next((opener for magic, opener in _COMPRESSED if start.startswith(magic)), open)
    stream: BinaryIO = opener(archive, "rb")
    return stream


def _done(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)
