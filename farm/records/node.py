"""Records of a node: its room, its state, and how many rollouts it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

UP = "up"
DRAINING = "draining"
BROKEN = "broken"
"""The state of a node with a pool that ends right after its start; its `info` names the pool."""
WITHOUT_SANDBOX = "without_sandbox"
"""Key in a node's `info`: the data sources whose handlers run without a sandbox."""
PROBES = 2
"""Concurrent rollouts of a node after it was out of service, until one of them succeeds."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node as its supervisor announced it. `room` is the number of concurrent rollouts.

    For `out_of_service_s` seconds it gets no rollouts, because too many failed there (`out_of_service_why`); `n_trips`
    counts such periods since the last rollout that succeeded there.
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
    """The unique id of the supervisor that uses this name."""
    up_s: float = 0.0
    """Seconds since it was announced."""

    @property
    def version(self) -> str:
        """The version of its code and its schema; empty if not reported."""
        versions = (self.info.get("version"), self.info.get("schema"))
        return f"{versions[0]} (schema {versions[1]})" if all(versions) else ""

    @property
    def lease_s(self) -> float:
        """Seconds until its workers' unrenewed claims expire; 0 if not reported."""
        value = self.info.get("lease_s", 0.0)
        return float(value) if isinstance(value, int | float) else 0.0

    @property
    def without_sandbox(self) -> frozenset[str]:
        """Data sources whose rollouts start with the run stage on this node."""
        value = self.info.get(WITHOUT_SANDBOX)
        return frozenset(filter(lambda name: isinstance(name, str), value)) if isinstance(value, list) else frozenset()

    @property
    def ends(self) -> bool:
        """True if it runs in a job with a time limit."""
        return isinstance(self.info.get("job_left_s"), int | float)

    def lasts_for(self, seconds: float) -> bool:
        """Return whether its job lasts that long, or for half of its limit: no other node would be better then."""
        if not self.ends:
            return True
        left_s = float(self.info["job_left_s"])
        return left_s - self.up_s >= min(seconds, left_s / 2)

    @property
    def takes(self) -> int:
        """The number of rollouts to place on it, including those it has."""
        if self.out_of_service_s > 0:
            return 0
        return min(self.room, PROBES) if self.n_trips else self.room
