"""Parts of a fault: what it did to which target, how it is undone, and what all faults of a run share."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.parts import Parts


class NotNow(Exception):
    """The fault found nothing to strike; the message says what it wanted."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that was injected. `undo` runs `after_s` later.

    `owners` are the names under which workers that it hit hold rollouts, `node/` for all of a node; `attempts` are
    those that it hit by itself. Both say whose recovery is to be timed.
    """

    target: str
    owners: tuple[str, ...] = ()
    attempts: tuple[tuple[str, int], ...] = ()
    undo: Callable[[], None] | None = None
    after_s: float = 0.0


@dataclass(slots=True)
class Interventions:
    """Deliberate interventions of clients. `perhaps_cancelled` were requested by a call that failed.

    `rescored` holds all that were requested, whatever the response.
    """

    cancelled: set[str] = field(default_factory=set)
    perhaps_cancelled: set[str] = field(default_factory=set)
    rescored: set[str] = field(default_factory=set)
    n_versions: int = 0
    poisoned: set[str] = field(default_factory=set)
    """Batches whose plug-in ends the process that plays it, as far as it may."""


@dataclass(slots=True)
class Scene:
    """The farm that a fault strikes, and the fault's own random generator.

    A fault that takes longer than a moment calls `tend` all the while: what others broke is repaired in time, and what
    ended is started again.
    """

    parts: Parts
    chance: random.Random
    interventions: Interventions
    tend: Callable[[], None]


Injection = Callable[[Scene], Strike]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault. `weight` is how many of it a deck has; one that `needs_store` waits until the database is up."""

    name: str
    inject: Injection
    weight: int
    needs_store: bool
    needs_postgres: bool
    needs_redis: bool
    patience_s: float
    """Seconds for which it may look for a target."""


KINDS: dict[str, Kind] = {}


def kind(
    weight: int,
    *,
    needs_store: bool = False,
    needs_postgres: bool = False,
    needs_redis: bool = False,
    patience_s: float = 15.0,
) -> Callable[[Injection], Injection]:
    """Let a function be a kind of fault, by its name."""

    def listed(inject: Injection) -> Injection:
        KINDS[inject.__name__] = Kind(
            inject.__name__, inject, weight, needs_store, needs_postgres, needs_redis, patience_s
        )
        return inject

    return listed


def deck(store: str = "postgres", broker: str = "redis") -> dict[str, int]:
    """Return the number of faults of each kind, for this database and this broker."""
    return {
        name: each.weight
        for name, each in KINDS.items()
        if (store == "postgres" or not each.needs_postgres) and (broker == "redis" or not each.needs_redis)
    }
