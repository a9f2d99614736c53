"""The seeds of draws: each call of each rollout has one of its own, and the same request has the same ones.

A stable hash of (seed, instance, place in the batch, sample) seeds a rollout, and a trainer's steps hash its seed with
their number first; its later calls, and the parts of an
answer that a weight update cut in two, hash that with their number and with the tokens before them. So no two draws
are tied, as `seed + k` would tie sample k of all instances and all turns, and nothing depends on when or where a
rollout is played.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_BITS = 63
"""Bits of a seed that vLLM takes; servers that take fewer are sent the lower bits."""


_MOST = 2**63 - 1024
"""No seed of a request is as high."""


def step_seed(seed: int, step: int) -> int:
    """Return the seed of a step's batch, or of a collector's wave, from that of its run."""
    return _hashed(seed, "step", step) % _MOST


def rollout_seed(
    seed: int, data_source: str, fields: Mapping[str, Any], group_index: str | int, sample_index: int
) -> int:
    """Return the seed of a rollout's first call, of 63 bits, from that of its batch."""
    instance = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=str)
    return _hashed(seed, data_source, instance, str(group_index), sample_index)


def call_seed(seed: int, number: int) -> int:
    """Return the seed of a rollout's call `number`, counted from 0; the first has the rollout's own."""
    return seed if number == 0 else _hashed(seed, "call", number)


def part_seed(seed: int, n_tokens: int) -> int:
    """Return the seed of the part of an answer that follows `n_tokens` sampled ones; the first has the call's own."""
    return seed if n_tokens == 0 else _hashed(seed, "part", n_tokens)


def _hashed(*parts: str | int) -> int:
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _BITS)
