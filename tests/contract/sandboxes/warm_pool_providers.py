"""Providers whose sandboxes all come from the warm pool: the promises of a sandbox also hold for these."""

from __future__ import annotations

import asyncio

from farm.records.request import SandboxSpec
from testkit.scratch_folder import sandbox_config
from workers.sandboxes.launch_plan import prepare
from workers.sandboxes.lifecycle import warm_pool
from workers.sandboxes.lifecycle.state import folder
from workers.sandboxes.namespace import NamespaceProvider
from workers.sandboxes.provider import NodeSandboxProvider
from workers.sandboxes.sandbox import NodeSandbox
from workers.sandboxes.singularity import SingularityProvider


class Stocked(NodeSandboxProvider):
    """Fills the warm pool with one sandbox before each start, and checks that the start returns it."""

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()
        self._one_at_a_time = asyncio.Lock()

    async def start(self, sandbox_id: str, spec: SandboxSpec) -> NodeSandbox:
        async with self._one_at_a_time:
            await asyncio.to_thread(self._stock_up, spec)
            sandbox = await super().start(sandbox_id, spec)
        assert folder(sandbox_config(), sandbox_id).stat().st_ino in self._made, "it was started anew"
        return sandbox

    def _stock_up(self, spec: SandboxSpec) -> None:
        config = sandbox_config()
        recipe, parts = self.recipe(spec), prepare(config, spec)
        # a refused start leaves its sandbox in the pool
        if not warm_pool.ready(config).get(recipe.key(parts)):
            self._made.add(recipe.fill_warm_pool(parts).stat().st_ino)


class StockedNamespace(Stocked, NamespaceProvider):
    """With namespaces."""


class StockedSingularity(Stocked, SingularityProvider):
    """With Apptainer or Singularity."""
