"""The door of a sandbox, as its shell and its kernel need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Entry(Protocol):
    """Gives the host command that runs something inside, and the environment to run it with."""

    sandbox_id: str

    def enter(self, argv: Sequence[str], cwd: str | None = None) -> list[str]:
        """Raises SandboxError if the sandbox is gone."""
        ...

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]: ...
