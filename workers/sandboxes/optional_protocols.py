"""Protocols that a provider of sandboxes may implement beside `SandboxProvider`; its kind then does more, and no less.

They are asked for by their methods, so a provider need not derive from anything of ours.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from farm.plugins import follows
from farm.records.request import SandboxSpec
from workers.interfaces import Sandbox, SandboxProvider
from workers.sandboxes.launch_plan import LaunchPlan

Prepare = Callable[[Sandbox], Awaitable[None]]
"""Stages files in a sandbox that is not the policy's yet."""


@runtime_checkable
class SharesLayers(Protocol):
    """Prepares the files of an instance once, for all of its samples."""

    async def start_prepared(self, sandbox_id: str, spec: SandboxSpec, what: str, prepare: Prepare) -> Sandbox:
        """As `start`, with files that `prepare` stages; that is done once for all of the same spec and `what`."""
        ...


@runtime_checkable
class StartsAhead(Protocol):
    """Has its sandboxes started by the warm pool before they are needed, which `LaunchPlan.start` then hands over.

    Both methods block: for long, if an image is to be built first.
    """

    def recipe(self, spec: SandboxSpec, layer: str = "") -> LaunchPlan:
        """Return the plan of a sandbox, on a layer if one is named. Raises SandboxError if the spec cannot be met."""
        ...

    def layer(self, spec: SandboxSpec, what: str) -> str:
        """Return the name of the layer that `start_prepared` makes of `what`."""
        ...


@runtime_checkable
class KeepsLayers(Protocol):
    """Keeps the files that are left in a sandbox as a layer of the node, `workers/sandboxes/lifecycle/layers.py`."""

    async def stop_keeping(self, sandbox: Sandbox, name: str) -> None:
        """Stop a sandbox; what it has written is the layer of that name from then on. Raises SandboxError."""
        ...

    async def start_on(self, sandbox_id: str, spec: SandboxSpec, name: str) -> Sandbox:
        """As `start`, on the files of a layer: of a sandbox that had the same image, packages and archives."""
        ...


@runtime_checkable
class CopiesLayers(KeepsLayers, Protocol):
    """Copies what is written in a sandbox that goes on, and leaves parts out of layers."""

    async def copy_layer(self, sandbox: Sandbox, spec: SandboxSpec, name: str) -> None:
        """Make a layer of what a sandbox has written so far; its processes stand still meanwhile."""
        ...

    async def restore_layer(self, spec: SandboxSpec, name: str, rule: Mapping[str, object]) -> dict[str, Any]:
        """Leave out of a layer what a rule names: see `restore` in `workers/sandboxes/isolation/layer_files.py`."""
        ...


@runtime_checkable
class KnowsImages(Protocol):
    """Knows of some images, without pulling them, that they are missing; asked at submit where all nodes are here."""

    def absent_image(self, spec: SandboxSpec) -> str:
        """Return why the image cannot be had, and what to do; empty if it may be there. Takes seconds at most."""
        ...


def keeps_layers(provider: SandboxProvider) -> KeepsLayers | None:
    """Return the provider if it can keep what is left in its sandboxes."""
    return provider if follows(provider, KeepsLayers) else None


def shares_layers(provider: SandboxProvider) -> SharesLayers | None:
    """Return the provider if it prepares once for several."""
    return provider if follows(provider, SharesLayers) else None


def starts_ahead(provider: SandboxProvider) -> StartsAhead | None:
    """Return the provider if the warm pool may start its sandboxes."""
    return provider if follows(provider, StartsAhead) else None
