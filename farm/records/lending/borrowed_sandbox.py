"""A borrowed sandbox: the request for it, and its state, as both sides see it.

It is leased: it ends `lease_s` after its last use or renewal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from farm.callers import Caller, Scope
from farm.errors import Forbidden, SandboxEnded
from farm.records.request_values import Name, Request
from farm.records.sandbox_spec import SandboxSpec
from farm.records.task_needs import NetworkRule

MAX_LEASE_S = 86_400.0
LEAST_LEASE_S = 5.0
LEASE_S = 600.0

LeaseSeconds = Annotated[float, Field(ge=LEAST_LEASE_S, le=MAX_LEASE_S)]
SandboxName = Annotated[Name, Field(max_length=200)]
_Label = Annotated[Name, Field(max_length=1000)]
Labels = Annotated[dict[_Label, _Label], Field(max_length=64)]
"""Labels by which a borrower finds its sandboxes."""


class BorrowRequest(Request):
    """A request for a sandbox. An unfinished sandbox with the same `name` and an equal request is reused."""

    spec: SandboxSpec = SandboxSpec()
    network: NetworkRule = "refuse"
    """As in a batch: a spec with network access is refused unless this is `allow`."""
    lease_s: LeaseSeconds = LEASE_S
    name: SandboxName = ""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """As in a batch: higher priorities get room first."""
    labels: Labels = Field(default_factory=dict)


class RenewOrder(Request):
    """Renews a lease; `lease_s`, if given, is its length from now on."""

    lease_s: LeaseSeconds | None = None


class SandboxState(StrEnum):
    """`waiting` for room on a node, `starting` there, `running`, and `ended`, which is final."""

    WAITING = "waiting"
    STARTING = "starting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class BorrowedSandbox:
    """The state of a borrowed sandbox; `ended_why` says who or what ended it; `finished`: its borrower ended it."""

    sandbox_id: str
    state: SandboxState
    borrower: str
    name: str
    node: str
    image: str
    lease_s: float
    lease_left_s: float
    age_s: float
    ended_why: str = ""
    finished: bool = False
    labels: Mapping[str, Any] = field(default_factory=dict)
    cpus: float | None = None
    memory_mb: int = 0
    disk_mb: int = 0

    @property
    def pending(self) -> bool:
        """True until it runs or has ended."""
        return self.state in (SandboxState.WAITING, SandboxState.STARTING)

    @property
    def ended(self) -> bool:
        return self.state is SandboxState.ENDED

    def ended_error(self) -> SandboxEnded:
        """Return the error for a call after its end."""
        return SandboxEnded(f"sandbox {self.sandbox_id} has ended: {self.ended_why}; start another")


@dataclass(frozen=True, slots=True)
class SandboxAddress:
    """The address of a running sandbox: its worker's URL, and the token that the worker requires for it."""

    sandbox_id: str
    borrower: str
    node: str
    url: str
    token: str


def check_borrower(caller: Caller, sandbox_id: str, borrower: str) -> None:
    """Raise Forbidden unless the caller may use a sandbox: its own, or with `operate` anybody's."""
    if borrower != caller.name and not caller.may(Scope.OPERATE):
        raise Forbidden(f"{borrower!r} borrowed sandbox {sandbox_id}, and key {caller.name!r} may only use its own")


def lease_left(left_s: float | None) -> float:
    """Return the seconds left of a lease, 0 after its end."""
    return 0.0 if left_s is None or math.isnan(left_s) else max(0.0, left_s)
