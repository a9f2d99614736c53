"""Simulated log-probabilities of any ids: the same ids always get the same values.

A hash simulates the model: values depend on the token, the one before it, the position and the weights. So scoring a
sequence gives the values of its sampling, a continued call continues where it was cut, and new weights are visible.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from farm.records.trajectory import LogProbs, TokenIds

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
