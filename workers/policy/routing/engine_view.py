"""The pool's view of the store: the farm's record of an engine, and a worker's reports on it.

The pool itself uses no database, so that a rollout can run without one; `workers.process.engine_registry` implements
the reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from farm.records.engine import EngineInfo, PauseMode, lacks_weights
from workers.policy.generation import EngineAddress

Paused: TypeAlias = PauseMode | Literal[""]


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """An engine of the farm. `info` is None until its capabilities have been detected.

    `paused` and `version` are what was ordered; `n_orders` counts orders, `version_order` is the number of the order
    that named the version, `n_done` that of the last completed one; `engine_paused` and `engine_version` are the last
    values sent to it. `failure` is the reason for its ejection, as reported by other workers. `weights_path` is the
    path of the weights `version` on the servers, if known.
    """

    address: EngineAddress
    info: EngineInfo | None = None
    state: Literal["active", "draining"] = "active"
    paused: Paused = ""
    version: str = ""
    version_order: int = 0
    n_orders: int = 0
    n_done: int = 0
    engine_paused: Paused = ""
    engine_version: str = ""
    failure: str = ""
    weights_path: str = ""
    reserved_for: str = ""
    """The model of the training run that it is reserved for; servers do not know such names."""

    @property
    def lacks_weights(self) -> bool:
        """True if it lacks the farm's weights, so that it gets no calls."""
        return lacks_weights(self.version, self.engine_version, to_name=self.to_name)

    @property
    def to_name(self) -> bool:
        """True if its weights are not yet named. An engine that was out during that order does not have them."""
        return self.version_order > self.n_done and self.version != self.engine_version


@dataclass(frozen=True, slots=True)
class InFlight:
    """This process's load on an engine, and the number of the last order that the process follows."""

    n_orders: int
    n_calls: int
    n_tokens: int


class EngineReporter(Protocol):
    """A worker's reports on engines. Called on the event loop, so none of the plain methods blocks."""

    def report_info(self, url: str, info: EngineInfo) -> None:
        """Report the capabilities of an engine."""
        ...

    def report_failure(self, url: str, why: str) -> None:
        """Report the reason for an engine's ejection; empty if it is readmitted."""
        ...

    def report(self, in_flight: Mapping[str, InFlight]) -> None:
        """Report the load of this process by URL; also its heartbeat."""
        ...

    async def is_leader(self) -> bool:
        """Return whether only this process may send engines their orders for the next seconds."""
        ...

    async def has_settled(self, url: str, order: int) -> bool:
        """Return whether every live worker follows this order for an engine, and has no call in flight there."""
        ...

    async def report_done(self, url: str, order: int, paused: Paused, version: str) -> None:
        """Report that an engine was sent all orders up to this one, and its resulting pause and version."""
        ...


class NoReporter:
    """The reporter of a single-process pool: it reports nothing, and sends no orders."""

    def report_info(self, url: str, info: EngineInfo) -> None: ...

    def report_failure(self, url: str, why: str) -> None: ...

    def report(self, in_flight: Mapping[str, InFlight]) -> None: ...

    async def is_leader(self) -> bool:
        return False

    async def has_settled(self, url: str, order: int) -> bool:
        return True

    async def report_done(self, url: str, order: int, paused: Paused, version: str) -> None: ...
