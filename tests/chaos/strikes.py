"""Parts of a fault: its effect on its target, its undo, and the shared state of all faults of a run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.chaos.parts import Parts


class NotNow(Exception):
    """The fault found no target; the message names the kind of target."""


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that was injected. `undo` runs `after_s` later.

    `owners` are the names under which affected workers hold rollouts, `node/` for a whole node; `attempts` are those
    that it hit directly. Both determine whose recovery is measured.
    """

    target: str
    owners: tuple[str, ...] = ()
    attempts: tuple[tuple[str, int], ...] = ()
    undo: Callable[[], None] | None = None
    after_s: float = 0.0


@dataclass(slots=True)
class Interventions:
    """Deliberate interventions of clients. `perhaps_cancelled` were requested by a call that failed.

    `rescored` has all requests, whatever the response.
    """

    cancelled: set[str] = field(default_factory=set)
    perhaps_cancelled: set[str] = field(default_factory=set)
    rescored: set[str] = field(default_factory=set)
    n_versions: int = 0
    poisoned: set[str] = field(default_factory=set)
    """Batches whose plug-in ends the process that runs it, if it can."""


@dataclass(slots=True)
class Scene:
    """The farm that a fault strikes, and the fault's own random generator.

    A longer fault calls `restart_dead` repeatedly, so that other faults are undone in time, and ended parts are
    restarted.
    """

    parts: Parts
    chance: random.Random
    interventions: Interventions
    restart_dead: Callable[[], None]


Injection = Callable[[Scene], Strike]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault. `weight` is its number per deck; one that `needs_store` waits until the database is up."""

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
    """Register a function as a kind of fault, by its name."""

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
