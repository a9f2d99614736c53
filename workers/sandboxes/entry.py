"""The door of a sandbox, as its shell and its kernels need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from farm.request import SandboxLimits
from workers.sandboxes.child import Child
from workers.sandboxes.notices import Notices

if TYPE_CHECKING:
    from workers.sandboxes.joining import Target


class Entry(Protocol):
    """Runs things inside."""

    sandbox_id: str
    socket_folder: Path
    workdir: str

    async def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        fds: Mapping[int, int],
        terminal: bool = False,
        cwd: str | None = None,
        limits: SandboxLimits | None = None,
    ) -> Child:
        """Start a program as leader of a session, with our descriptors (values) as its own (keys).

        Of 0, 1 and 2 those that are not given are /dev/null. With `terminal`, 0 is its controlling terminal. Raises
        SandboxError if the sandbox is gone.
        """
        ...

    def target(self, limits: SandboxLimits | None = None) -> Target:
        """What a process of ours needs to know to join by itself."""
        ...

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]: ...

    def notices(self) -> Notices:
        """Tells which limits of the sandbox are reached from now on."""
        ...

    async def read_file(self, path: str) -> bytes: ...
