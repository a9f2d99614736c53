"""Which engine takes a call: a pure function of what each has to do, how fast it is, and who plays where already.

The measure is expected waiting: tokens in flight with this call, over the engine's speed. A rollout stays where its
prefix is cached, and a new one goes where rendezvous hashing puts its group, the same on every node, so that siblings
share their prompt's prefix (Thaler and Ravishankar 1998); both give way when that engine has clearly more to do than
another, as in consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2016).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

_JOIN = 1.5
"""A group's engine is taken unless its waiting is this many times that of the best."""
_STAY = 3.0
"""A rollout stays unless its engine's waiting is this many times that of the best: moving costs its cached prefix."""
_ROOM_CALLS = 8
"""An engine with less to do than this many such calls has room: what it has does not make it a worse one."""
_FAST_ENOUGH = 0.5
"""But one slower than this share of the fastest is a worse one all the same."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An engine that could take a call now. `speed` is that of `workers.policy.load`, less while it starts slowly."""

    url: str
    n_tokens: int
    speed: float


def choose(candidates: Sequence[Candidate], n_tokens: int, group: str, stay: str = "") -> str:
    """The URL of the engine for a call of `n_tokens`; `stay` is where its rollout plays. Needs one candidate or more.

    `group` names those who share a prefix.
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
