"""The layers that policies left, stored as artefacts of their attempts."""

from __future__ import annotations

import asyncio
from functools import partial

from farm.records.submission import KeptLayer
from farm.store.blobs import artefacts
from farm.store.database import Store
from farm.store.rollouts import Claim

NAME = "layer.tar"
"""Cannot collide with a tool's artefact, whose name begins with the number of a turn."""
_TYPE = "application/x-tar"


class AttemptLayers:
    """See `workers.stages.left_layer.LayerStore`; for one claim."""

    def __init__(self, store: Store, claim: Claim, layer_mb: float) -> None:
        self._store = store
        self._claim = claim
        self.max_bytes = int(layer_mb * 1_000_000)

    async def save(self, data: bytes, n_bytes: int) -> None:
        work = partial(artefacts.keep, held=self._claim, name=NAME, media_type=_TYPE, n_bytes=n_bytes, data=data)
        # if the claim is gone, nothing of this attempt counts
        await asyncio.wrap_future(self._store.submit(work))

    async def load(self, layer: KeptLayer) -> bytes:
        read = partial(artefacts.packed_contents, rollout_id=self._claim.rollout_id, attempt=layer.attempt, name=NAME)
        return await asyncio.to_thread(self._store.read, read)
