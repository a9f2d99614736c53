"""The provider for all kinds of sandbox on this node. The kinds differ in the command that creates a sandbox."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from weakref import WeakValueDictionary

from farm.errors import SandboxError
from farm.ids import prepare_sandbox_id
from farm.records.request import SandboxSpec
from farm.settings import settings
from workers.config import SandboxConfig
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.absent_images import absent_image
from workers.sandboxes.images.content_store import MAKE_S, digest
from workers.sandboxes.launch_plan import LaunchPlan, Runtime, attach, prepare, settled
from workers.sandboxes.lifecycle import layers, left_layers
from workers.sandboxes.lifecycle.state import folder
from workers.sandboxes.optional_protocols import Prepare
from workers.sandboxes.resource_exhaustion import scarcity
from workers.sandboxes.sandbox import SEARCH_PATH, NodeSandbox
from workers.stage_clock import off_clock

T = TypeVar("T")

_SIGNAL_S = 10.0
_THREADS = ThreadPoolExecutor(max_workers=64, thread_name_prefix="sandbox")


class _Start:
    """A start in a thread, which cannot be interrupted: after a cancellation, thread or caller ends the sandbox."""

    def __init__(self, work: Callable[[], NodeSandbox]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._given_up = False
        self._sandbox: NodeSandbox | None = None

    def run(self) -> NodeSandbox:
        if self._given_up:
            raise SandboxError("The sandbox was not started: its start was cancelled")
        with scarcity("start a sandbox"):
            sandbox = self._work()
        with self._lock:
            self._sandbox = sandbox
            given_up = self._given_up
        if given_up:
            sandbox.end()
        return sandbox

    def give_up(self) -> NodeSandbox | None:
        """Have the sandbox ended as soon as it is up; return it if it is up already."""
        with self._lock:
            self._given_up = True
            return self._sandbox


async def _in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a separate thread pool and in the caller's context.

    The event loop's own pool must stay free to stop sandboxes, because some starts wait for an image build. The context
    attributes that wait to the caller's stage.
    """
    return await asyncio.get_running_loop().run_in_executor(_THREADS, copy_context().run, work)


async def _started(work: Callable[[], NodeSandbox]) -> NodeSandbox:
    start = _Start(work)
    try:
        return await _in_thread(start.run)
    except BaseException as error:
        if sandbox := start.give_up():
            await asyncio.shield(sandbox.stop())
        # the executor cannot start more threads; it has queued the work nevertheless
        if isinstance(error, RuntimeError):
            raise SandboxError(f"this worker could not start a sandbox: {error}") from error
        raise


def _detached(config: SandboxConfig, sandbox_id: str) -> Path:
    try:
        return layers.detach(config, folder(config, sandbox_id))
    except FileNotFoundError:
        raise SandboxError(f"sandbox {sandbox_id} is gone, and what its policy left with it") from None


def _settle(config: SandboxConfig, sandbox: Sandbox, files: Path) -> None:
    """Record the owner of files that the sandbox's programs wrote, unless that was root."""
    users = sandbox.users if isinstance(sandbox, NodeSandbox) else None
    if users is not None and users.user != (0, 0):
        left_layers.settle_owners(config, files, users.user, users.lower)


class NodeSandboxProvider:
    """See `SandboxProvider`; also implements `SharesLayers`, `StartsAhead` and `CopiesLayers`."""

    kind: ClassVar[str]
    runtime: Runtime | None = None

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self._config = config
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @property
    def config(self) -> SandboxConfig:
        """The given configuration, else that by the settings which this process has now."""
        return self._config or SandboxConfig.of(settings())

    def absent_image(self, spec: SandboxSpec) -> str:
        return absent_image(self.config, spec.image, spec.image_values)

    def recipe(self, spec: SandboxSpec, layer: str = "") -> LaunchPlan:
        """Return the plan for sandboxes of this kind. Raises SandboxError if the spec cannot be met."""
        return LaunchPlan(self.config, self.kind, spec, self.runtime, layer)

    async def start(self, sandbox_id: str, spec: SandboxSpec) -> NodeSandbox:
        return await _started(partial(self.recipe(spec).start, sandbox_id))

    async def attach(self, sandbox_id: str, spec: SandboxSpec) -> NodeSandbox:
        return await _in_thread(partial(attach, self.config, self.kind, sandbox_id, spec))

    def layer(self, spec: SandboxSpec, what: str) -> str:
        """Return the name of the layer with the files prepared as `what` for this spec. Blocks like `prepare`."""
        return digest(self.recipe(spec).key(prepare(self.config, spec)), what)

    async def start_prepared(self, sandbox_id: str, spec: SandboxSpec, what: str, prepare: Prepare) -> NodeSandbox:
        """Start a sandbox like `start`, with files that `prepare` stages once for all with the same spec and `what`.

        A concurrent caller waits, and its stage's clock is paused: to prepare a second sandbox would take as long and
        use more of the node.
        """
        name = await _in_thread(partial(self.layer, spec, what))
        if not layers.exists(self.config, name):
            turn = self._turns.setdefault(name, asyncio.Lock())
            with off_clock(MAKE_S):
                await turn.acquire()
            try:
                if not layers.exists(self.config, name):
                    await self._prepare(sandbox_id, spec, name, prepare)
            finally:
                turn.release()
        return await _started(partial(self.recipe(spec, name).start, sandbox_id))

    async def stop_keeping(self, sandbox: Sandbox, name: str) -> None:
        with scarcity(f"keep the layer of sandbox {sandbox.sandbox_id}"):
            new = await _in_thread(partial(_detached, self.config, sandbox.sandbox_id))
            await asyncio.shield(sandbox.stop())
            await _in_thread(partial(left_layers.clean, self.config, layers.files_of(new)))
            await _in_thread(partial(_settle, self.config, sandbox, layers.files_of(new)))
            await _in_thread(partial(layers.publish, new, name))

    async def start_on(self, sandbox_id: str, spec: SandboxSpec, name: str) -> NodeSandbox:
        return await _started(partial(self.recipe(spec, name).start, sandbox_id))

    async def copy_layer(self, sandbox: Sandbox, spec: SandboxSpec, name: str) -> None:
        upper = folder(self.config, sandbox.sandbox_id) / layers.WRITTEN
        with scarcity(f"copy the layer of sandbox {sandbox.sandbox_id}"):
            await sandbox.exec(["/bin/bash", "-c", "kill -STOP -1"], timeout_s=_SIGNAL_S)
            try:
                await _in_thread(partial(left_layers.copy, self.config, upper, name, spec.limits.disk_mb << 20))
                await _in_thread(partial(_settle, self.config, sandbox, left_layers.files_of(self.config, name)))
            finally:
                await sandbox.exec(["/bin/bash", "-c", "kill -CONT -1"], timeout_s=_SIGNAL_S)

    async def restore_layer(self, spec: SandboxSpec, name: str, rule: Mapping[str, object]) -> dict[str, Any]:
        parts = await _in_thread(partial(prepare, self.config, spec))
        bin_folders = [each for each in parts.variables.get("PATH", SEARCH_PATH).split(":") if each.startswith("/")]
        folders = {
            "bin_folders": list(dict.fromkeys([*bin_folders, *SEARCH_PATH.split(":")])),
            "workdir": settled(spec, parts).workdir,
        }
        return await _in_thread(partial(left_layers.restore, self.config, name, {**rule, **folders}, parts.lower))

    async def _prepare(self, sandbox_id: str, spec: SandboxSpec, name: str, prepare: Prepare) -> None:
        first = await self.start(prepare_sandbox_id(sandbox_id), spec)
        try:
            await prepare(first)
            new = layers.detach(self.config, folder(self.config, first.sandbox_id))
        finally:
            await asyncio.shield(first.stop())
        await asyncio.to_thread(layers.publish, new, name)
