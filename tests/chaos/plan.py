"""The plan of a run: which fault strikes when. The same seed, length and pace give the same plan, by its digest.

Kinds are dealt from shuffled decks, not drawn one by one, so that a run of a few minutes has seen every kind. What a
fault strikes is decided when it does, by a number of the plan: which processes and rollouts there are by then depends
on the machine.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One fault to come. `at_s` counts from the beginning of the run; `draw` seeds what is left to chance."""

    index: int
    at_s: float
    kind: str
    draw: int


def plan(seed: int, minutes: float, pace_s: float, deck: Mapping[str, int]) -> list[Event]:
    """Faults at a mean distance of `pace_s`; `deck` says how many of each kind go round before it is shuffled again."""
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
    """Names a plan."""
    return hashlib.sha256(json.dumps([asdict(event) for event in events]).encode()).hexdigest()[:12]
