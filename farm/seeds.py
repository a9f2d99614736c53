"""Sampling seeds: each call of each rollout has its own, and the same request gets the same seeds.

A rollout's seed is a stable hash of (seed, instance, index in the batch, sample); a trainer's step first hashes its
seed with the step number. Later calls hash the rollout's seed with their number; the parts of an answer that a weight
update split hash the call's seed with the number of tokens before them. So no two draws are correlated (`seed + k`
would correlate sample k of all instances and all turns), and no seed depends on when or where a rollout runs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_BITS = 63
"""Bits of a seed that vLLM accepts; servers that accept fewer get the lower bits."""


_MOST = 2**63 - 1024
"""The exclusive upper bound of a request's seed."""


def step_seed(seed: int, step: int) -> int:
    """Return the seed of a step's batch, or of a collector's wave, from the seed of its run."""
    return _hashed(seed, "step", step) % _MOST


def rollout_seed(
    seed: int, data_source: str, fields: Mapping[str, Any], group_index: str | int, sample_index: int
) -> int:
    """Return the 63-bit seed of a rollout's first call from the seed of its batch."""
    instance = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=str)
    return _hashed(seed, data_source, instance, str(group_index), sample_index)


def call_seed(seed: int, number: int) -> int:
    """Return the seed of a rollout's call `number`, counted from 0; the first call has the rollout's seed."""
    return seed if number == 0 else _hashed(seed, "call", number)


def part_seed(seed: int, n_tokens: int) -> int:
    """Return the seed of the part of an answer after `n_tokens` sampled tokens; the first part has the call's seed."""
    return seed if n_tokens == 0 else _hashed(seed, "part", n_tokens)


def _hashed(*parts: str | int) -> int:
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _BITS)
