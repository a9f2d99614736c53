"""The entry to a sandbox, for its shell and its kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from farm.records.request import SandboxLimits
from workers.sandboxes.processes.limit_events import LimitEvents
from workers.sandboxes.processes.sandbox_process import SandboxProcess

if TYPE_CHECKING:
    from workers.sandboxes.isolation.namespaces import JoinTarget


class SandboxEntry(Protocol):
    """Starts processes inside a sandbox."""

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
    ) -> SandboxProcess:
        """Start a program as session leader, with the caller's descriptors (values) as its own (keys).

        Missing descriptors of 0, 1 and 2 are /dev/null. With `terminal`, descriptor 0 is its controlling terminal.
        Raises SandboxError if the sandbox is gone.
        """
        ...

    def target(self, limits: SandboxLimits | None = None) -> JoinTarget:
        """Return the data that a process of the farm needs to join the sandbox itself."""
        ...

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]: ...

    def notices(self) -> LimitEvents:
        """Return the sandbox's limit events from now on."""
        ...

    async def read_file(self, path: str) -> bytes: ...
