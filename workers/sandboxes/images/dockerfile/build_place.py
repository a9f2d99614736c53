"""The place of a build: a sandbox in which one step of a Dockerfile creates its layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from workers.sandboxes.images.layered_image import Image


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """The end of a program: its exit code, None if it was killed at its time limit; and both outputs in order."""

    code: int | None
    output: str
    limit: str = ""


Owner: TypeAlias = tuple[int, int]
"""A user and a group by number, recorded as a file's owner."""


class BuildPlace(Protocol):
    """A sandbox on an image for one step. All methods block; ToolError for a file, SandboxError if it is gone."""

    @property
    def bare(self) -> bool:
        """True if its image has no programs yet, so that nothing can be run in it."""
        ...

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
        ...

    def is_folder(self, path: str) -> bool:
        """Return whether a path is a folder, or a link to one."""
        ...

    def has(self, path: str) -> bool:
        """Return whether a file, folder or link exists at a path."""
        ...

    def read_file(self, path: str) -> bytes: ...

    def make_folder(self, path: str, mode: int) -> None:
        """Create a folder with this mode, and its missing parents."""
        ...

    def upload(self, source: Path, path: str, owner: Owner | None = None) -> None:
        """Copy a file, or the contents of a folder, from the node; owned by `owner`, else by root."""
        ...

    def unpack(self, archive: Path, path: str, owner: Owner | None = None) -> None:
        """Unpack a tar file of the node, compressed or not, into a folder.

        Its files belong to `owner`, else to the owners in the archive.
        """
        ...

    def copy_from(
        self, other: BuildPlace, source: str, path: str, owner: Owner | None = None, *, whole: bool = False
    ) -> None:
        """Copy a file, or the contents of a folder, from another place; links are not changed.

        All files belong to `owner`, else they keep their owners. If the folder at `path` and its parents are created,
        they belong to `owner`, else to root; a folder that is copied `whole` also keeps its mode and owner.
        """
        ...

    def finish(self, target: Path, owner: Owner | None = None) -> None:
        """End it and move its changes to a folder that does not exist yet; new files belong to `owner`."""
        ...

    def stop(self) -> None:
        """End it; harmless when repeated."""
        ...


StartBuild: TypeAlias = Callable[[Image], BuildPlace]
"""Starts a new place on an image. Raises SandboxError."""
