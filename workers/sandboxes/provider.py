"""What the kinds of sandbox on this node have in common as providers: they differ in the command that makes one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar, TypeVar
from weakref import WeakValueDictionary

from farm.errors import SandboxError
from farm.request import SandboxSpec
from workers.interfaces import Sandbox
from workers.sandboxes import layers
from workers.sandboxes.content import digest
from workers.sandboxes.joined import JoinedSandbox
from workers.sandboxes.prepared import Recipe, Runtime, attach, prepare
from workers.sandboxes.record import folder
from workers.sandboxes.scarcity import scarcity

T = TypeVar("T")

_THREADS = ThreadPoolExecutor(max_workers=64, thread_name_prefix="sandbox")

Prepare = Callable[[Sandbox], Awaitable[None]]
"""Stages files in a sandbox that is not the policy's yet."""


def prepare_id(sandbox_id: str) -> str:
    """The id of the sandbox that is prepared for another one and its siblings."""
    return f"{sandbox_id}.prepare"


class _Start:
    """A start in a thread, which nothing can interrupt: whoever is later, it or who gives it up, ends the sandbox."""

    def __init__(self, work: Callable[[], JoinedSandbox]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._given_up = False
        self._sandbox: JoinedSandbox | None = None

    def run(self) -> JoinedSandbox:
        if self._given_up:
            raise SandboxError("a sandbox is not started, as nobody waits for it any more")
        with scarcity("start a sandbox"):
            sandbox = self._work()
        with self._lock:
            self._sandbox = sandbox
            given_up = self._given_up
        if given_up:
            sandbox.end()
        return sandbox

    def give_up(self) -> JoinedSandbox | None:
        """From now on the sandbox is ended as soon as it is up; returns it if it is already."""
        with self._lock:
            self._given_up = True
            return self._sandbox


async def _in_thread(work: Callable[[], T]) -> T:
    """Not in the event loop's own threads: some wait for an image to be built, and sandboxes must be stopped then."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)


async def _started(work: Callable[[], JoinedSandbox]) -> JoinedSandbox:
    start = _Start(work)
    try:
        return await _in_thread(start.run)
    except BaseException as error:
        if sandbox := start.give_up():
            await asyncio.shield(sandbox.stop())
        # the executor's, that it can have no more threads; it has kept the work nevertheless
        if isinstance(error, RuntimeError):
            raise SandboxError(f"this worker could not start a sandbox: {error}") from error
        raise


class JoinedProvider:
    """See `workers.interfaces.SandboxProvider`: sandboxes that may come from stock, and be prepared once for many."""

    kind: ClassVar[str]
    runtime: Runtime | None = None

    def __init__(self) -> None:
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def recipe(self, spec: SandboxSpec, layer: str = "") -> Recipe:
        """How a sandbox of this kind is made. Raises SandboxError if the spec cannot be met."""
        return Recipe(self.kind, spec, self.runtime, layer)

    async def start(self, sandbox_id: str, spec: SandboxSpec) -> JoinedSandbox:
        """See `SandboxProvider.start`."""
        return await _started(partial(self.recipe(spec).start, sandbox_id))

    async def attach(self, sandbox_id: str, spec: SandboxSpec) -> JoinedSandbox:
        """See `SandboxProvider.attach`."""
        return await _in_thread(partial(attach, self.kind, sandbox_id, spec))

    def layer(self, spec: SandboxSpec, what: str) -> str:
        """The name of the layer that has what is prepared as `what` in sandboxes of this spec. Blocks as `prepare`."""
        return digest(self.recipe(spec).key(prepare(spec)), what)

    async def start_prepared(self, sandbox_id: str, spec: SandboxSpec, what: str, prepare: Prepare) -> JoinedSandbox:
        """As `start`, with files that `prepare` stages; that is done once for all of the same spec and `what`.

        Who comes while it is done waits: to prepare another would take as long, and more of the node.
        """
        name = await _in_thread(partial(self.layer, spec, what))
        if not layers.exists(name):
            turn = self._turns.setdefault(name, asyncio.Lock())
            async with turn:
                if not layers.exists(name):
                    await self._prepare(sandbox_id, spec, name, prepare)
        return await _started(partial(self.recipe(spec, name).start, sandbox_id))

    async def _prepare(self, sandbox_id: str, spec: SandboxSpec, name: str, prepare: Prepare) -> None:
        first = await self.start(prepare_id(sandbox_id), spec)
        try:
            await prepare(first)
            new = layers.detach(folder(first.sandbox_id))
        finally:
            await asyncio.shield(first.stop())
        await asyncio.to_thread(layers.publish, new, name)
