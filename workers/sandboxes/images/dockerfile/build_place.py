"""The place of a build: a sandbox in which one step of a Dockerfile makes its layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from workers.sandboxes.images.layered_image import Image


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """The end of a program: its code, None if it was killed at its time limit; both outputs, as they were written."""

    code: int | None
    output: str
    limit: str = ""


Owner: TypeAlias = tuple[int, int]
"""A user and a group by number, as whose a file is noted."""


class BuildPlace(Protocol):
    """A sandbox on an image, for one step. Blocks in every method; ToolError for a file, SandboxError if it is gone."""

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
        """Run a program as root, or as the user and group of `identity`, with this environment and no more."""
        ...

    def is_folder(self, path: str) -> bool:
        """Return whether a path is that of a folder, or of a link to one."""
        ...

    def has(self, path: str) -> bool:
        """Return whether there is a file, a folder or a link of this path."""
        ...

    def read_file(self, path: str) -> bytes: ...

    def make_folder(self, path: str, mode: int) -> None:
        """Make a folder of this mode, and those above it."""
        ...

    def upload(self, source: Path, path: str, owner: Owner | None = None) -> None:
        """Copy a file or what is in a folder of the node to a path; all of it is the owner's, else root's."""
        ...

    def unpack(self, archive: Path, path: str, owner: Owner | None = None) -> None:
        """Unpack a tar file of the node, compressed or not, into a folder.

        Its files are the owner's, else whose it says.
        """
        ...

    def copy_from(
        self, other: BuildPlace, source: str, path: str, owner: Owner | None = None, *, whole: bool = False
    ) -> None:
        """Copy a file or what is in a folder of another place to a path; links stay as they are.

        All of it is the owner's, else whose it is there. The folder at `path` and those above it are the owner's, else
        root's, if they are made; a folder that is copied `whole` keeps its mode and its owner as well.
        """
        ...

    def finish(self, target: Path, owner: Owner | None = None) -> None:
        """End it, and move what has been changed in it to a folder that does not exist; what is new is the owner's."""
        ...

    def stop(self) -> None:
        """End it; harmless when repeated."""
        ...


StartBuild: TypeAlias = Callable[[Image], BuildPlace]
"""Starts a place of its own on an image. SandboxError."""
