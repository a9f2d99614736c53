"""Simulated log-probabilities and routed experts (as of a mixture of experts) of any ids: the same for the same ids.

A hash simulates the model. Log-probabilities depend on the token, the one before it, the position and the weights. So
scoring a sequence gives the values of its sampling, a continued call continues where it was cut, and new weights are
visible. The experts of a token depend on the layer, on all ids up to it and on the weights.
"""

from __future__ import annotations

import base64
import io
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from farm.records.trajectory import LogProbs, TokenIds

if TYPE_CHECKING:
    from workers.testing.engine.scheduler import EngineRun

_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_MEAN = 0.7


def scored(ids: TokenIds, start: int, version: str, seed: int) -> LogProbs:
    """Return those of ids [start, n), all below zero, before temperature."""
    positions = np.arange(start, len(ids), dtype=np.uint64)
    before = np.concatenate([[0], ids])[start : len(ids)].astype(np.uint64)
    weights = np.uint64(zlib.crc32(f"{seed}/{version}".encode()))
    drawn = mixed(mixed(mixed(ids[start:].astype(np.uint64) + weights) + before) + positions)
    uniform = ((drawn >> np.uint64(11)).astype(np.float64) + 1.0) / (2.0**53 + 1.0)
    return (np.log(uniform) * _MEAN - 1e-6).astype(np.float32)


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return SplitMix64's output function (Steele, Lea and Flood 2014, https://doi.org/10.1145/2660193.2660195)."""
    values = values * _ODD
    values = (values ^ (values >> np.uint64(30))) * _MIX[0]
    values = (values ^ (values >> np.uint64(27))) * _MIX[1]
    return values ^ (values >> np.uint64(31))


def rank(logprob: float) -> int:
    """Return a rank among all tokens that fits the log-probability."""
    return 1 + int(-8.0 * logprob)


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """`top_k` of `n_experts` for each token and each of `n_layers`."""

    n_layers: int = 3
    top_k: int = 2
    n_experts: int = 64

    def of(self, ids: TokenIds, version: str) -> NDArray[np.int32]:
        """Return the experts of input ids under these weights, [n, n_layers, top_k]."""
        weights = np.uint64(zlib.crc32(version.encode()))
        positions = np.arange(len(ids), dtype=np.uint64)
        history: NDArray[np.uint64] = np.cumsum(mixed(ids.astype(np.uint64) + positions), dtype=np.uint64)
        layers = np.arange(self.n_layers, dtype=np.uint64)
        first: NDArray[np.uint64] = mixed(mixed(history + weights)[:, None] + layers)[:, :, None]
        chosen = (first + np.arange(self.top_k, dtype=np.uint64)) % np.uint64(self.n_experts)
        return chosen.astype(np.int32)

    def rows(self, run: EngineRun, start: int) -> NDArray[np.int32]:
        """Return those of a run's tokens from position `start` on, except the last, which was not an input.

        A token is an input under the weights that sampled the next one; so are the tokens of the prompt.
        """
        ids = np.concatenate([run.prompt, run.ids])
        experts = np.zeros((len(ids), self.n_layers, self.top_k), np.int32)
        for span in run.spans:
            begin = span.start + len(run.prompt) - 1 if span.start else 0
            end = span.end + len(run.prompt) - 1
            experts[begin:end] = self.of(ids, span.version)[begin:end]
        return experts[start : len(ids) - 1]

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
