"""Protocols that a provider of sandboxes may implement beside `SandboxProvider`; its kind then does more, and no less.

Some are of its sandboxes. They are asked for by their methods, so a provider need not derive from anything of ours.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from farm.plugins import follows
from farm.records.lending.sandbox_calls import FileEntry
from farm.records.request import SandboxSpec
from workers.plugins.interfaces import Sandbox, SandboxProvider
from workers.sandboxes.images.dockerfile.image_config import ImageConfig
from workers.sandboxes.launch_plan import LaunchPlan
from workers.sandboxes.processes.limit_events import LimitEvents
from workers.sandboxes.processes.sandbox_process import SandboxProcess

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


@runtime_checkable
class StartsPrograms(Protocol):
    """A sandbox that starts programs which run on, with descriptors of the worker's own."""

    async def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        fds: Mapping[int, int],
        terminal: bool = False,
        cwd: str | None = None,
    ) -> SandboxProcess:
        """See `SandboxEntry.start`."""
        ...

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of every command, and more."""
        ...

    def notices(self) -> LimitEvents:
        """See `SandboxEntry.notices`."""
        ...


@runtime_checkable
class HasUsers(Protocol):
    """A sandbox with several users."""

    def as_user(self, user: str) -> Sandbox:
        """Return a handle on it whose programs are another user's; the image's own if `user` is empty.

        Raises SandboxError if it has no such user. Blocks briefly.
        """
        ...


@runtime_checkable
class HasImageConfig(Protocol):
    """A sandbox of an image that says what its programs are."""

    def image_config(self) -> ImageConfig:
        """Return what the image's Dockerfile declares; nothing of an image that was not built here."""
        ...


@runtime_checkable
class ManagesFiles(Protocol):
    """A sandbox that lists, moves and removes files without programs of its image. All raise ToolError."""

    async def list_files(self, path: str, depth: int) -> list[FileEntry]:
        """Return the entries of a folder, down to a depth of folders; of depth 0, its own."""
        ...

    async def move_file(self, path: str, target: str) -> None: ...

    async def remove_file(self, path: str) -> None:
        """Remove a file, or a folder with all that is in it."""
        ...

    async def make_folder(self, path: str) -> None:
        """Make a folder that is not there yet, and those above it."""
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
