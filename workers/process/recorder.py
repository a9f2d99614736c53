"""Records of one running attempt in the store: its model calls, its artefacts, and the layer that its policy left."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from pathlib import PurePosixPath
from typing import Any, TypeVar

from farm.records.submission import KeptLayer
from farm.records.trajectory import ModelCall
from farm.store import trajectories
from farm.store.blobs import artefacts
from farm.store.database import Store
from farm.store.rollouts import Claim
from workers.plugins import plugin_values
from workers.plugins.interfaces import Artefact

_NAME_CHARS = 80
_STORE_S = 5.0
"""Seconds that a stage waits for an unresponsive store."""

_LAYER = "layer.tar"
"""Cannot collide with a tool's artefact, whose name begins with the number of a turn."""
_TAR = "application/x-tar"

T = TypeVar("T")
log = logging.getLogger(__name__)


class AttemptRecorder:
    """Writes the artefacts and model calls of one attempt, and keeps the model calls for the segments."""

    def __init__(self, store: Store, claim: Claim, artefacts_mb: float) -> None:
        self._store = store
        self._claim = claim
        self._log = trajectories.CallLog(claim.rollout_id, claim.attempt)
        self._room = int(artefacts_mb * 1_000_000)
        self._names: set[str] = set()
        self._late: Future[Any] | None = None
        self.calls: dict[int, ModelCall] = {}

    def in_order(self) -> Sequence[ModelCall]:
        return [self.calls[index] for index in sorted(self.calls)]

    async def record(self, call: ModelCall) -> None:
        plugin_values.record(call, self._claim.rollout_id)
        self.calls[call.index] = call
        row, experts = self._log.row(call), call.routed_experts
        # if all calls were kept here, the expert indices of a worker's rollouts would take gigabytes
        call.routed_experts = experts and experts.stored()
        # sampled tokens are written even if the rollout is stopped here, e.g. at its deadline
        await self._written(self._store.submit(lambda connection: trajectories.record_call(connection, row, experts)))

    async def keep(self, index: int, artefact: Artefact) -> str:
        plugin_values.artefact(artefact, self._claim.rollout_id)
        data = await asyncio.to_thread(artefacts.packed, artefact.data)
        if len(data) > self._room:
            return ""
        self._room -= len(data)
        name = self._new_name(index, artefact.name)
        work = partial(
            artefacts.keep,
            held=self._claim,
            name=name,
            media_type=artefact.media_type,
            n_bytes=len(artefact.data),
            data=data,
        )
        return "" if await self._written(self._store.submit(work)) is False else name

    async def _written(self, writing: Future[T]) -> T | None:
        """Return the result of a write, or None if the store is unavailable, so that the rollout loses no time.

        Later writes are then not waited for until this one succeeds. All are made later, in order.
        """
        late = self._late is not None and not self._late.done()
        if not late:
            await asyncio.wait([asyncio.wrap_future(writing)], timeout=_STORE_S)
        if writing.done():
            return writing.result()
        self._late = writing
        writing.add_done_callback(self._written_late)
        return None

    def _written_late(self, done: Future[Any]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("Rollout %s: deferred records could not be written: %s", self._claim.rollout_id, error)

    def _new_name(self, index: int, requested: str) -> str:
        """Return the turn and the requested name, valid as a file name, with a number if it is taken."""
        path = PurePosixPath(re.sub(r"[^A-Za-z0-9._-]+", "-", requested)[-_NAME_CHARS:])
        tries = ("" if number == 1 else f"-{number}" for number in count(1))
        name = next(name for more in tries if (name := f"{index}-{path.stem}{more}{path.suffix}") not in self._names)
        self._names.add(name)
        return name


class AttemptLayers:
    """See `workers.stages.left_layer.LayerStore`; for one claim."""

    def __init__(self, store: Store, claim: Claim, layer_mb: float) -> None:
        self._store = store
        self._claim = claim
        self.max_bytes = int(layer_mb * 1_000_000)

    async def save(self, data: bytes, n_bytes: int) -> None:
        work = partial(artefacts.keep, held=self._claim, name=_LAYER, media_type=_TAR, n_bytes=n_bytes, data=data)
        # if the claim is gone, nothing of this attempt counts
        await asyncio.wrap_future(self._store.submit(work))

    async def load(self, layer: KeptLayer) -> bytes:
        read = partial(artefacts.packed_contents, rollout_id=self._claim.rollout_id, attempt=layer.attempt, name=_LAYER)
        return await asyncio.to_thread(self._store.read, read)
