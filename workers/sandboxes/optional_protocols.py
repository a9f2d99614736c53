"""Optional protocols for sandbox providers beside `SandboxProvider`, and for their sandboxes.

The farm detects them by their methods, so a provider need not inherit from them.
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
from workers.sandboxes.processes.sandbox_process import LimitEvents, SandboxProcess

Prepare = Callable[[Sandbox], Awaitable[None]]
"""Stages files in a sandbox before the policy gets it."""


@runtime_checkable
class SharesLayers(Protocol):
    """Prepares the files of an instance once for all of its samples."""

    async def start_prepared(self, sandbox_id: str, spec: SandboxSpec, what: str, prepare: Prepare) -> Sandbox:
        """Start a sandbox like `start`, with files that `prepare` stages once for all with the same spec and `what`."""


@runtime_checkable
class StartsAhead(Protocol):
    """Lets the warm pool start its sandboxes in advance; `LaunchPlan.start` then takes them.

    Both methods block, for a long time if an image must be built first.
    """

    def recipe(self, spec: SandboxSpec, layer: str = "") -> LaunchPlan:
        """Return the plan of a sandbox, optionally on a layer. Raises SandboxError if the spec cannot be met."""

    def layer(self, spec: SandboxSpec, what: str) -> str:
        """Return the name of the layer that `start_prepared` creates for `what`."""


@runtime_checkable
class KeepsLayers(Protocol):
    """Keeps the files written in a sandbox as a layer on the node, see `workers/sandboxes/lifecycle/layers.py`."""

    async def stop_keeping(self, sandbox: Sandbox, name: str) -> None:
        """Stop a sandbox and keep its written files as the layer `name`. Raises SandboxError."""

    async def start_on(self, sandbox_id: str, spec: SandboxSpec, name: str) -> Sandbox:
        """Start a sandbox on a layer from a sandbox with the same image, packages and archives."""


@runtime_checkable
class CopiesLayers(KeepsLayers, Protocol):
    """Copies the written files of a running sandbox, and removes parts from layers."""

    async def copy_layer(self, sandbox: Sandbox, spec: SandboxSpec, name: str) -> None:
        """Create a layer from the files written so far; the sandbox's processes are paused meanwhile."""

    async def restore_layer(self, spec: SandboxSpec, name: str, rule: Mapping[str, object]) -> dict[str, Any]:
        """Remove from a layer what a rule names: see `restore` in `workers/sandboxes/isolation/layer_files.py`."""


@runtime_checkable
class KnowsImages(Protocol):
    """Detects missing images without pulling them; used at submit if all nodes are on this machine."""

    def absent_image(self, spec: SandboxSpec) -> str:
        """Return why the image is missing and what to do; empty if it may exist. Takes seconds at most."""


@runtime_checkable
class StartsPrograms(Protocol):
    """A sandbox that starts long-running programs with descriptors of the worker."""

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

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of every command, extended by `more`."""

    def notices(self) -> LimitEvents:
        """See `SandboxEntry.notices`."""


@runtime_checkable
class HasUsers(Protocol):
    """A sandbox with several users."""

    def as_user(self, user: str) -> Sandbox:
        """Return a handle whose programs run as another user; as the image's own user if `user` is empty.

        Raises SandboxError if the sandbox has no such user. Blocks briefly.
        """


@runtime_checkable
class HasImageConfig(Protocol):
    """A sandbox whose image declares how to run its programs."""

    def image_config(self) -> ImageConfig:
        """Return the settings of the image's Dockerfile; empty for an image that was not built here."""


@runtime_checkable
class ManagesFiles(Protocol):
    """A sandbox that lists, moves and removes files without programs of its image. All methods raise ToolError."""

    async def list_files(self, path: str, depth: int) -> list[FileEntry]:
        """Return the entries of a folder and its subfolders down to `depth`; with 0, the entry of the path itself."""

    async def move_file(self, path: str, target: str) -> None: ...

    async def remove_file(self, path: str) -> None:
        """Remove a file, or a folder with its contents."""

    async def make_folder(self, path: str) -> None:
        """Create a new folder and its missing parents."""


def keeps_layers(provider: SandboxProvider) -> KeepsLayers | None:
    """Return the provider if it can keep the files of its sandboxes."""
    return provider if follows(provider, KeepsLayers) else None


def shares_layers(provider: SandboxProvider) -> SharesLayers | None:
    """Return the provider if it can prepare files once for several sandboxes."""
    return provider if follows(provider, SharesLayers) else None


def starts_ahead(provider: SandboxProvider) -> StartsAhead | None:
    """Return the provider if the warm pool may start its sandboxes in advance."""
    return provider if follows(provider, StartsAhead) else None
