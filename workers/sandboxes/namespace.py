"""Sandboxes without a container runtime: namespaces and an overlay, made by the monitor itself."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from farm.request import SandboxSpec
from workers.sandboxes.joined import JoinedSandbox
from workers.sandboxes.prepared import attach, start
from workers.sandboxes.probe import namespaces_missing


class NamespaceProvider:
    """See `workers.interfaces.SandboxProvider`."""

    kind: ClassVar[str] = "namespace"

    def missing(self) -> str:
        return namespaces_missing()

    async def start(self, sandbox_id: str, spec: SandboxSpec) -> JoinedSandbox:
        return await asyncio.to_thread(start, self.kind, sandbox_id, spec, None)

    async def attach(self, sandbox_id: str, spec: SandboxSpec) -> JoinedSandbox:
        return await asyncio.to_thread(attach, self.kind, sandbox_id, spec)
