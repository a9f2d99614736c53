"""An example of a third-party sandbox provider: plain processes in a folder of the node.

It isolates nothing. Commands run with the rights of the worker: they see the node's files, processes and network, and
have no limits. So `auto` never chooses it, and it must not run a model's commands. Nothing is swept after a killed
worker: its processes keep running.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import ClassVar

from farm.errors import SandboxError
from farm.records.request import SandboxSpec
from farm.settings import settings
from workers.plugins.interfaces import Sandbox
from workers.testing.local_sandbox import LocalSandbox

_REFUSED = (
    "image",
    "image_values",
    "archives",
    "packages",
    "agent_packages",
    "agent_python",
    "agent_programs",
    "fake_root",
)
"""Fields of a spec for which plain processes differ from a sandbox."""


class PlainProvider:
    """See `SandboxProvider`. A sandbox is a folder, which any process of the node finds by its id."""

    kind: ClassVar[str] = "plain"
    priority: ClassVar[int] = -1
    """Negative: it is chosen only by name."""

    def missing(self) -> str:
        return "" if shutil.which("bash") else "there is no bash on PATH: install it"

    async def start(self, sandbox_id: str, spec: SandboxSpec) -> Sandbox:
        _check(sandbox_id, spec)
        return await asyncio.to_thread(_start, sandbox_id, spec)

    async def attach(self, sandbox_id: str, spec: SandboxSpec) -> Sandbox:
        _check(sandbox_id, spec)
        return await asyncio.to_thread(_attach, sandbox_id, spec)


def _check(sandbox_id: str, spec: SandboxSpec) -> None:
    """Raise SandboxError for a spec that cannot be met: ignoring a part of it would change the task."""
    if "/" in sandbox_id or sandbox_id.startswith("."):
        raise SandboxError(f"sandbox {sandbox_id!r}: the id must be a plain name")
    usual = SandboxSpec()
    if refused := [name for name in _REFUSED if getattr(spec, name) != getattr(usual, name)]:
        raise SandboxError(f"sandbox {sandbox_id}: a plain sandbox does not support {', '.join(refused)}")


def _folder(sandbox_id: str) -> Path:
    return settings().scratch.absolute() / "plain" / sandbox_id


def _start(sandbox_id: str, spec: SandboxSpec) -> LocalSandbox:
    try:
        _folder(sandbox_id).mkdir(mode=0o700, parents=True)
    except FileExistsError:
        raise SandboxError(f"sandbox {sandbox_id}: a sandbox with this id already exists") from None
    return LocalSandbox(sandbox_id, spec, _folder(sandbox_id))


def _attach(sandbox_id: str, spec: SandboxSpec) -> LocalSandbox:
    if not _folder(sandbox_id).is_dir():
        raise SandboxError(f"sandbox {sandbox_id}: no plain sandbox with this id runs on this node")
    return LocalSandbox(sandbox_id, spec, _folder(sandbox_id))
