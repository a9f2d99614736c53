"""Simulated routed experts, as of a mixture-of-experts model.

A hash simulates the model: the experts of a token depend on the layer, on all ids up to it and on the weights.
"""

from __future__ import annotations

import base64
import io
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farm.records.trajectory import TokenIds
from workers.testing.engine.logprobs import mixed
from workers.testing.engine.scheduler import EngineRun


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """`top_k` of `n_experts` for each token and each of `n_layers`."""

    n_layers: int = 3
    top_k: int = 2
    n_experts: int = 64

    def of(self, ids: TokenIds, version: str) -> NDArray[np.int32]:
        """Return the experts of input ids under these weights, [n, n_layers, top_k]."""
        weights = np.uint64(zlib.crc32(version.encode()))
        places = np.arange(len(ids), dtype=np.uint64)
        history: NDArray[np.uint64] = np.cumsum(mixed(ids.astype(np.uint64) + places), dtype=np.uint64)
        layers = np.arange(self.n_layers, dtype=np.uint64)
        first: NDArray[np.uint64] = mixed(mixed(history + weights)[:, None] + layers)[:, :, None]
        chosen = (first + np.arange(self.top_k, dtype=np.uint64)) % np.uint64(self.n_experts)
        return chosen.astype(np.int32)

    def rows(self, run: EngineRun, start: int) -> NDArray[np.int32]:
        """Return those of a run's tokens from position `start` on, except the last, which was not an input.

        A token is an input under the weights that sampled the next one; so are the tokens of the prompt.
        """
        ids = np.concatenate([run.prompt, run.ids])
        result = np.zeros((len(ids), self.n_layers, self.top_k), np.int32)
        for span in run.spans:
            begin = span.start + len(run.prompt) - 1 if span.start else 0
            end = span.end + len(run.prompt) - 1
            result[begin:end] = self.of(ids, span.version)[begin:end]
        return result[start : len(ids) - 1]

    def in_npy(self, run: EngineRun, start: int) -> str:
        """Return the rows in vLLM's encoding."""
        with io.BytesIO() as file:
            np.save(file, self.rows(run, start).astype(np.uint8 if self.n_experts <= 256 else np.uint16))
            return base64.b64encode(file.getvalue()).decode()

    def in_int32(self, run: EngineRun, start: int) -> str:
        """Return the rows in SGLang's encoding."""
        return base64.b64encode(self.rows(run, start).astype("<i4").tobytes()).decode()


def npy_of(routing: ExpertRouting | None, run: EngineRun, start: int) -> Any:
    """Return vLLM's field: None without the flag, or for a run that sampled nothing."""
    return routing.in_npy(run, start) if routing is not None and run.n_sampled else None
