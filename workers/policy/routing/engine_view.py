"""The pool's view of the store: the farm's record of an engine, and the reports of a worker on it.

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

    `paused` and `version` are what was ordered; `n_orders` counts orders, `version_order` is the number of the one that
    named the version, `n_done` that of the last one carried out; `engine_paused` and `engine_version` are what it was
    sent last. `failure` is the reason for its ejection, as other workers report it. `weights_path` is where servers
    find the weights `version`, if that is known.
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
        """True if its weights have still to be named. An engine that was out at that order does not have them."""
        return self.version_order > self.n_done and self.version != self.engine_version


@dataclass(frozen=True, slots=True)
class InFlight:
    """The load of this process on an engine, and the number of the last order for it that the process follows."""

    n_orders: int
    n_calls: int
    n_tokens: int


class EngineReporter(Protocol):
    """The reports of a worker on engines. Called on the event loop, so none of the plain methods blocks."""

    def report_info(self, url: str, info: EngineInfo) -> None:
        """Report the capabilities of an engine."""
        ...

    def report_failure(self, url: str, why: str) -> None:
        """Report the reason for the ejection of an engine; empty if it is readmitted."""
        ...

    def report(self, in_flight: Mapping[str, InFlight]) -> None:
        """Report the load of this process, by URL; also its heartbeat."""
        ...

    async def is_leader(self) -> bool:
        """Return whether this process is the only one that may send engines their orders for the next seconds."""
        ...

    async def has_settled(self, url: str, order: int) -> bool:
        """Return whether every live worker follows this order for an engine, and has no call in flight there."""
        ...

    async def report_done(self, url: str, order: int, paused: Paused, version: str) -> None:
        """Report that an engine has been sent all orders up to this one, and its pause and version then."""
        ...


class NoReporter:
    """The reporter of a pool of one process: it reports nothing, and sends no orders."""

    def report_info(self, url: str, info: EngineInfo) -> None: ...

    def report_failure(self, url: str, why: str) -> None: ...

    def report(self, in_flight: Mapping[str, InFlight]) -> None: ...

    async def is_leader(self) -> bool:
        return False

    async def has_settled(self, url: str, order: int) -> bool:
        return True

    async def report_done(self, url: str, order: int, paused: Paused, version: str) -> None: ...
