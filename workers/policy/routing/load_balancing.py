"""The choice of an engine for a call: a pure function of load, speed, and the engine that its rollout already uses.

The measure is the expected wait: tokens in flight including this call, divided by the engine's speed. A rollout stays
where its prefix is cached. A new one goes to the engine that rendezvous hashing assigns to its group, the same on every
node, so that siblings share their prompt's prefix (Thaler and Ravishankar 1998). Both rules yield when that engine has
clearly more load than another, as in consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2016).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

_JOIN = 1.5
"""A group's engine is chosen unless its wait is more than this many times the shortest."""
_STAY = 3.0
"""A rollout stays unless its engine's wait is more than this many times the shortest: moving costs its cache."""
_ROOM_CALLS = 8
"""An engine with less load than this many such calls has room: its wait does not exclude it."""
_FAST_ENOUGH = 0.5
"""The share of the fastest engine's speed below which even an engine with room is excluded."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that could take a call now. `speed` is that of `workers.policy.routing.load`, less in a slow start."""

    url: str
    n_tokens: int
    speed: float


def choose(candidates: Sequence[Candidate], n_tokens: int, group: str, stay: str = "") -> str:
    """Return the URL of the engine for a call of `n_tokens`. Needs at least one candidate.

    `group` names the rollouts that share a prefix; `stay` is the URL that the rollout already uses.
    """
    best = min(_waiting(each, n_tokens) for each in candidates)
    fastest = max(each.speed for each in candidates)
    for each in candidates:
        if each.url == stay and _will_do(each, n_tokens, best * _STAY, fastest):
            return stay
    for each in sorted(candidates, key=lambda each: _rank(group, each.url), reverse=True):
        if _will_do(each, n_tokens, best * _JOIN, fastest):
            return each.url
    raise AssertionError("the best one will do")


def _waiting(each: Candidate, n_tokens: int) -> float:
    return (each.n_tokens + n_tokens) / each.speed


def _will_do(each: Candidate, n_tokens: int, longest: float, fastest: float) -> bool:
    if _waiting(each, n_tokens) <= longest:
        return True
    return each.n_tokens < _ROOM_CALLS * n_tokens and each.speed >= _FAST_ENOUGH * fastest


def _rank(group: str, url: str) -> bytes:
    return hashlib.blake2b(f"{group}\n{url}".encode(), digest_size=8).digest()
