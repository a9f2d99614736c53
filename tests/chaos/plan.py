"""The plan of a run: the kind and time of each fault. Equal seeds, lengths and rates give equal plans and digests.

Kinds are dealt from shuffled decks, not drawn one by one, so that a run of a few minutes has every kind. The target of
a fault is chosen when it strikes, by a number of the plan, as the processes and rollouts at that time depend on the
machine.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One planned fault. `at_s` counts from the beginning of the run; `draw` seeds its random choices."""

    index: int
    at_s: float
    kind: str
    draw: int


def plan(seed: int, minutes: float, pace_s: float, deck: Mapping[str, int]) -> list[Event]:
    """Return faults at a mean distance of `pace_s`; `deck` is the number of each kind per shuffled deck."""
    chance = random.Random(seed)
    kinds = _dealt(chance, deck)
    events: list[Event] = []
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(1 / pace_s)) < minutes * 60:
        events.append(Event(len(events), round(at_s, 3), next(kinds), chance.getrandbits(32)))
    return events


def _dealt(chance: random.Random, deck: Mapping[str, int]) -> Iterator[str]:
    while True:
        cards = [kind for kind, n in sorted(deck.items()) for _ in range(n)]
        chance.shuffle(cards)
        yield from cards


def digest(events: list[Event]) -> str:
    """Return an identifier of a plan."""
    return hashlib.sha256(json.dumps([asdict(event) for event in events]).encode()).hexdigest()[:12]
