"""The policy's writable layer: kept at the end of the run stage, mounted again under a fresh sandbox."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any, Protocol
from uuid import uuid4

from farm.errors import EvaluatorError, HandlerError, LayerMissing
from farm.plugins import follows
from farm.records.request import SandboxSpec
from farm.records.submission import KeptLayer
from workers.plugins.handler import NothingLeft, RestoredFiles
from workers.plugins.interfaces import Sandbox
from workers.sandboxes.images.content_store import digest
from workers.sandboxes.lifecycle import layers, left_layers
from workers.sandboxes.optional_protocols import CopiesLayers, KeepsLayers, keeps_layers
from workers.stage_clock import off_clock
from workers.stages.stage_job import SandboxSource, StageJob

log = logging.getLogger(__name__)


class LayerStore(Protocol):
    """Stores packed layers of one rollout off the node, each of at most `max_bytes`."""

    max_bytes: int

    async def save(self, data: bytes, n_bytes: int) -> None:
        """Store a packed layer that has `n_bytes` unpacked."""
        ...

    async def load(self, layer: KeptLayer) -> bytes:
        """Return a stored layer. Raises NotFound."""
        ...


def _keeper(job: StageJob, source: SandboxSource) -> KeepsLayers:
    keeper = keeps_layers(source.provider)
    if keeper is None:
        raise HandlerError(
            f"{job.rollout_id}: handler {job.data_source} needs the policy's files, and sandboxes of "
            f"kind {source.provider.kind} cannot keep them: choose another kind",
            retryable=False,
        )
    return keeper


async def keep_layer(
    job: StageJob, source: SandboxSource, sandbox: Sandbox, store: LayerStore, restored: RestoredFiles | None = None
) -> KeptLayer:
    """Stop a sandbox and keep its writable layer: on this node, and in the store up to its cap.

    Not charged to the policy's time. Raises SandboxError if the sandbox is gone.
    """
    name = f"{layers.LEFT}{digest(job.rollout_id, job.attempt)[:32]}"
    keeper = _keeper(job, source)
    with off_clock(left_layers.PACK_S):
        await keeper.stop_keeping(sandbox, name)
        report = await _restore(job, source, name, restored)
        packed = await asyncio.to_thread(left_layers.packed, job.config.sandboxes, name, store.max_bytes)
        if packed is not None:
            await store.save(*packed)
    if packed is None:
        log.info(
            "Rollout %s: its layer exceeds FARM_LAYER_MB (%g MB); it is scored once, on this node",
            job.rollout_id,
            store.max_bytes / 1e6,
        )
    return KeptLayer(name=name, attempt=job.attempt, stored=packed is not None, **report)


async def _restore(job: StageJob, source: SandboxSource, name: str, restored: RestoredFiles | None) -> dict[str, Any]:
    if restored is None:
        return {}
    return await _copier(job, source).restore_layer(source.spec, name, asdict(restored))


def _copier(job: StageJob, source: SandboxSource) -> CopiesLayers:
    if not follows(source.provider, CopiesLayers):
        raise HandlerError(
            f"{job.rollout_id}: handler {job.data_source} restores image files in the policy's layer, "
            f"and sandboxes of kind {source.provider.kind} cannot do that: choose another kind",
            retryable=False,
        )
    return source.provider


@asynccontextmanager
async def copied_layer(
    job: StageJob, source: SandboxSource, sandbox: Sandbox, restored: RestoredFiles | None
) -> AsyncIterator[KeptLayer]:
    """Yield a copy of a running sandbox's layer; it is removed at the end.

    Raises NothingLeft if the copy would exceed the sandbox's limit.
    """
    copier = _copier(job, source)
    name = f"{layers.LEFT}{uuid4().hex}"
    try:
        try:
            await copier.copy_layer(sandbox, source.spec, name)
        except left_layers.LayerTooLarge as error:
            raise NothingLeft(str(error)) from error
        report = await _restore(job, source, name, restored)
        yield KeptLayer(name=name, attempt=job.attempt, stored=False, **report)
    finally:
        await asyncio.to_thread(layers.discard, job.config.sandboxes, name)


async def open_layer(
    job: StageJob,
    source: SandboxSource,
    own_spec: SandboxSpec | None,
    layer: KeptLayer,
    store: LayerStore,
    sandbox_id: str,
) -> Sandbox:
    """Start a sandbox with the files that the policy left.

    Raises LayerMissing if they were too large to keep, EvaluatorError for a spec with another image.
    """
    if own_spec is None or _base(source.spec) != _base(own_spec):
        raise EvaluatorError(
            f"{job.rollout_id}: the policy's files need the image, packages and archives of its own sandbox; the "
            "evaluator asked for others"
        )
    keeper, config = _keeper(job, source), job.config.sandboxes
    if not layers.exists(config, layer.name):
        if not layer.stored:
            raise LayerMissing(
                f"{job.rollout_id}: cannot be scored again: the files of its policy were larger than FARM_LAYER_MB and "
                f"were not kept; raise it above {store.max_bytes / 1e6:g} and run the rollout again"
            )
        with off_clock(left_layers.PACK_S):
            data = await store.load(layer)
            await asyncio.to_thread(left_layers.unpack, config, layer.name, data, store.max_bytes)
    return await keeper.start_on(sandbox_id, source.spec, layer.name)


def _base(spec: SandboxSpec) -> tuple[object, ...]:
    named = (spec.image, spec.image_values, spec.fallback_image)
    return (*named, spec.packages, spec.agent_packages, spec.archives)


class NoLayerStore:
    """A `LayerStore` that stores nothing."""

    max_bytes = 0

    async def save(self, data: bytes, n_bytes: int) -> None:
        """Do nothing."""

    async def load(self, layer: KeptLayer) -> bytes:
        raise LayerMissing(f"the layer {layer.name} is not stored")
