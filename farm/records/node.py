"""Records of a node: its room and state, and how many rollouts it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

UP = "up"
DRAINING = "draining"
BROKEN = "broken"
"""The state of a node one of whose pools ends as soon as it is started; its `info` says which."""
WITHOUT_SANDBOX = "without_sandbox"
"""In a node's `info`: the data sources whose rollouts its handlers play without a sandbox."""
PROBES = 2
"""Rollouts a node gets at a time after it was out of service, until one of them succeeds."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node as its supervisor announced it. `room` is the number of rollouts that it takes at a time.

    For `out_of_service_s` seconds no rollout is placed on it, because too many failed there (`out_of_service_why`);
    `n_trips` counts such periods since the last rollout that succeeded there.
    """

    node: str
    room: int
    init_slots: int
    run_slots: int
    eval_slots: int
    handlers: list[str]
    info: dict[str, Any]
    state: str = UP
    heartbeat_age_s: float = 0.0
    out_of_service_s: float = 0.0
    out_of_service_why: str = ""
    n_trips: int = 0
    instance: str = ""
    """The supervisor that goes by this name, one of all there ever were."""
    up_s: float = 0.0
    """Seconds since it was announced."""

    @property
    def version(self) -> str:
        """The version of its code and its schema; empty if it does not say."""
        said = (self.info.get("version"), self.info.get("schema"))
        return f"{said[0]} (schema {said[1]})" if all(said) else ""

    @property
    def lease_s(self) -> float:
        """Seconds its workers' claims live without renewal; 0 if it does not say."""
        said = self.info.get("lease_s", 0.0)
        return float(said) if isinstance(said, int | float) else 0.0

    @property
    def without_sandbox(self) -> frozenset[str]:
        """Data sources whose rollouts begin with the run stage on it."""
        said = self.info.get(WITHOUT_SANDBOX)
        return frozenset(filter(lambda name: isinstance(name, str), said)) if isinstance(said, list) else frozenset()

    @property
    def ends(self) -> bool:
        """True if it runs in a job with a time limit."""
        return isinstance(self.info.get("job_left_s"), int | float)

    def lasts_for(self, seconds: float) -> bool:
        """Return whether its job goes on for so long; or for half of what it had, as no other would be better then."""
        if not self.ends:
            return True
        said = float(self.info["job_left_s"])
        return said - self.up_s >= min(seconds, said / 2)

    @property
    def takes(self) -> int:
        """Number of rollouts to place on it, those it has included."""
        if self.out_of_service_s > 0:
            return 0
        return min(self.room, PROBES) if self.n_trips else self.room
