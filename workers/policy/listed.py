"""What the farm says of an engine now, and what a worker says back: the pool's whole view of the store.

The pool itself knows no database, so that a rollout can be played without one; `workers.fleet` is the real thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from farm.engine import EngineInfo, PauseMode
from workers.policy.generation import EngineAddress

Paused: TypeAlias = PauseMode | Literal[""]


@dataclass(frozen=True, slots=True)
class Listed:
    """An engine of the farm. `info` is None until somebody has asked it what it can do.

    `paused` and `version` are what was ordered; `n_orders` counts orders, `version_order` is the one that named the
    version, `n_done` those that it was told; `engine_paused` and `engine_version` are what it was told last. `failure`
    is why it is out, as others see it.
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

    @property
    def to_name(self) -> bool:
        """Whether its weights have still to be named. One that was out when they were does not have them."""
        return self.version_order > self.n_done and self.version != self.engine_version


@dataclass(frozen=True, slots=True)
class InFlight:
    """What this process has on an engine, and the last order for it that the process follows."""

    n_orders: int
    n_calls: int
    n_tokens: int


class Ledger(Protocol):
    """Where a worker writes down what it learns of engines. Called on the event loop, so nothing here waits."""

    def found(self, url: str, info: EngineInfo) -> None:
        """What an engine can do."""
        ...

    def failing(self, url: str, why: str) -> None:
        """Why an engine is out; empty: it is back."""
        ...

    def report(self, in_flight: Mapping[str, InFlight]) -> None:
        """What this process does with the engines, by URL; also the sign that it lives."""
        ...

    async def leads(self) -> bool:
        """Whether this process is the one, of all, that may give engines their orders for the next seconds."""
        ...

    async def carried_out(self, url: str, order: int, paused: Paused, version: str) -> None:
        """An engine was told all orders up to this one."""
        ...


class NoLedger:
    """For a pool of one process: nobody else needs to know, and nobody gives orders."""

    def found(self, url: str, info: EngineInfo) -> None: ...

    def failing(self, url: str, why: str) -> None: ...

    def report(self, in_flight: Mapping[str, InFlight]) -> None: ...

    async def leads(self) -> bool:
        return False

    async def carried_out(self, url: str, order: int, paused: Paused, version: str) -> None: ...
