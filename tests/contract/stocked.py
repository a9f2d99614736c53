"""Providers whose sandboxes all come from stock: what is promised of a sandbox holds for these too."""

from __future__ import annotations

import asyncio

from farm.request import SandboxSpec
from workers.sandboxes import stock
from workers.sandboxes.joined import JoinedSandbox
from workers.sandboxes.namespace import NamespaceProvider
from workers.sandboxes.prepared import prepare
from workers.sandboxes.provider import JoinedProvider
from workers.sandboxes.record import folder
from workers.sandboxes.singularity import SingularityProvider


class Stocked(JoinedProvider):
    """Puts one in stock before each start, and checks that it is what the start gives."""

    def __init__(self) -> None:
        super().__init__()
        self._made: set[int] = set()
        self._one_at_a_time = asyncio.Lock()

    async def start(self, sandbox_id: str, spec: SandboxSpec) -> JoinedSandbox:
        async with self._one_at_a_time:
            await asyncio.to_thread(self._stock_up, spec)
            sandbox = await super().start(sandbox_id, spec)
        assert folder(sandbox_id).stat().st_ino in self._made, "it was started anew"
        return sandbox

    def _stock_up(self, spec: SandboxSpec) -> None:
        recipe, parts = self.recipe(spec), prepare(spec)
        # a start that was refused leaves what it was to have
        if not stock.ready().get(recipe.key(parts)):
            self._made.add(recipe.stock_up(parts).stat().st_ino)


class StockedNamespace(Stocked, NamespaceProvider):
    """Of namespaces."""


class StockedSingularity(Stocked, SingularityProvider):
    """Of Apptainer or Singularity."""
