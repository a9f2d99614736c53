"""Sandboxes without a container runtime: namespaces and an overlay, made by the monitor itself."""

from __future__ import annotations

from typing import ClassVar

from workers.sandboxes import cgroups
from workers.sandboxes.probe import namespaces_missing
from workers.sandboxes.provider import JoinedProvider


class NamespaceProvider(JoinedProvider):
    """See `workers.interfaces.SandboxProvider`."""

    kind: ClassVar[str] = "namespace"

    def missing(self) -> str:
        """See `SandboxProvider.missing`."""
        return namespaces_missing() or cgroups.missing()
