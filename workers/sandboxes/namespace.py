"""Sandboxes without a container runtime: the monitor creates the namespaces and the overlay itself."""

from __future__ import annotations

from typing import ClassVar

from workers.sandboxes import cgroups
from workers.sandboxes.probe import namespaces_missing
from workers.sandboxes.provider import NodeSandboxProvider


class NamespaceProvider(NodeSandboxProvider):
    """See `workers.plugins.interfaces.SandboxProvider`."""

    kind: ClassVar[str] = "namespace"
    priority: ClassVar[int] = 10

    def missing(self) -> str:
        return namespaces_missing() or cgroups.missing()
