"""The warm pool and shared layers work for a provider that derives from none of our classes, if it has the methods."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest

from farm.records.request import SandboxSpec
from farm.settings import settings
from testkit.scratch_folder import sandbox_config
from tests.conftest import absent
from tests.services.farms import until
from workers.config import SandboxConfig
from workers.plugins.interfaces import Sandbox, SandboxProvider
from workers.process.warm_pool_filler import WarmPoolDemand, WarmPoolFiller
from workers.sandboxes.images.content_store import digest
from workers.sandboxes.launch_plan import LaunchPlan, attach, prepare
from workers.sandboxes.lifecycle import layers, warm_pool
from workers.sandboxes.lifecycle.state import folder
from workers.sandboxes.namespace import NamespaceProvider
from workers.sandboxes.optional_protocols import Prepare, shares_layers, starts_ahead

Run = Callable[[Any], Any]


class ComposedProvider:
    """Launches by plans, as a provider with its own runtime would."""

    kind: ClassVar[str] = "composed"

    def missing(self) -> str:
        return NamespaceProvider().missing()

    async def start(self, sandbox_id: str, spec: SandboxSpec) -> Sandbox:
        return await asyncio.to_thread(self.recipe(spec).start, sandbox_id)

    async def attach(self, sandbox_id: str, spec: SandboxSpec) -> Sandbox:
        return await asyncio.to_thread(attach, sandbox_config(), self.kind, sandbox_id, spec)

    def recipe(self, spec: SandboxSpec, layer: str = "") -> LaunchPlan:
        return LaunchPlan(sandbox_config(), self.kind, spec, None, layer)

    def layer(self, spec: SandboxSpec, what: str) -> str:
        return digest(self.recipe(spec).key(prepare(sandbox_config(), spec)), what)

    async def start_prepared(self, sandbox_id: str, spec: SandboxSpec, what: str, prepare: Prepare) -> Sandbox:
        config = sandbox_config()
        name = await asyncio.to_thread(self.layer, spec, what)
        if not layers.exists(config, name):
            first = await self.start(f"{sandbox_id}-first", spec)
            await prepare(first)
            new = layers.detach(config, folder(config, first.sandbox_id))
            await first.stop()
            await asyncio.to_thread(layers.publish, new, name)
        return await asyncio.to_thread(self.recipe(spec, name).start, sandbox_id)


@pytest.fixture(scope="module")
def composed(sandbox_settings: None) -> SandboxProvider:
    provider = ComposedProvider()
    if missing := provider.missing():
        absent(missing)
    return provider


@pytest.fixture(autouse=True)
def nothing_is_left(sandbox_settings: None) -> Iterator[None]:
    config = sandbox_config()
    warm_pool.uses(config, -1)
    yield
    layers.sweep(config, 0.0)


def test_warm_pool_is_filled_and_used_for_the_provider(
    composed: SandboxProvider, run: Run, config: SandboxConfig
) -> None:
    provider, spec = starts_ahead(composed), SandboxSpec()
    assert provider is not None
    demand = [WarmPoolDemand(provider.recipe(spec), 1)]
    filler = WarmPoolFiller(lambda limit: demand, settings())
    key = demand[0].recipe.key(prepare(config, spec))

    def is_filled() -> bool:
        filler.round()
        return len(warm_pool.ready(config).get(key, [])) == 1

    until(is_filled, "there is one in the pool")
    (made,) = (path.stat().st_ino for path in warm_pool.ready(config)[key])
    sandbox = run(composed.start("composed-warm", spec))
    assert folder(config, "composed-warm").stat().st_ino == made
    assert run(sandbox.exec(["echo", "hi"], timeout_s=20)).stdout == b"hi\n"
    run(sandbox.stop())


def test_prepared_layer_is_shared_by_all_samples(composed: SandboxProvider, run: Run) -> None:
    provider = shares_layers(composed)
    assert provider is not None
    n_prepared = 0

    async def stage(sandbox: Sandbox) -> None:
        nonlocal n_prepared
        n_prepared += 1
        await sandbox.write_file("staged", b"once")

    start = partial(provider.start_prepared, spec=SandboxSpec(), what="an instance", prepare=stage)
    sandboxes = [run(start(f"composed-{n}")) for n in range(3)]
    assert n_prepared == 1
    for sandbox in sandboxes:
        assert run(sandbox.read_file("staged")) == b"once"
        run(sandbox.stop())
