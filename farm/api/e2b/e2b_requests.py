"""Bodies and queries of E2B's REST API. Fields for features that a rootless sandbox lacks are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

from pydantic import AfterValidator, Field

from farm.errors import InvalidRequest
from farm.records.lending.borrowed_sandbox import LEAST_LEASE_S, MAX_LEASE_S, BorrowRequest, Labels
from farm.records.request_values import Name, Request
from farm.records.sandbox_spec import SandboxSpec

DEFAULT_TEMPLATE = "base"
"""The template of requests that name none: the farm's default image."""
_TIMEOUT_S = 300
_NAME_PREFIX = "e2b:"

_Timeout = Annotated[int, Field(ge=0, le=int(MAX_LEASE_S))]


def _nothing(value: Any) -> Any:
    if value:
        raise ValueError("is not supported by the farm's sandboxes: leave it out")
    return value


Unsupported = Annotated[Any, AfterValidator(_nothing)]
"""A field that must be empty or absent; some clients send it empty."""


class _AutoResume(Request):
    enabled: Literal[False] = False
    timeout: Any = None


class NewSandbox(Request):
    """A sandbox of a template, which is an image as `SandboxSpec.image` names it."""

    template: Annotated[Name, Field(alias="templateID", min_length=1, max_length=1000)] = DEFAULT_TEMPLATE
    timeout: _Timeout = _TIMEOUT_S
    auto_pause: Annotated[Unsupported, Field(alias="autoPause")] = False
    auto_pause_memory: Annotated[bool, Field(alias="autoPauseMemory")] = True
    auto_resume: Annotated[_AutoResume | None, Field(alias="autoResume")] = None
    secure: bool = True
    allow_internet_access: bool | None = None
    network: Unsupported = None
    metadata: Labels = Field(default_factory=dict)
    env: Annotated[dict[Name, Name], Field(alias="envVars")] = Field(default_factory=dict)
    mcp: Unsupported = None
    iam: Unsupported = None
    volume_mounts: Annotated[Unsupported, Field(alias="volumeMounts")] = None

    def borrow_request(self, idempotency_key: str) -> BorrowRequest:
        """Return its request to borrow. The network is the node's, and only given on request."""
        image = SandboxSpec().image if self.template == DEFAULT_TEMPLATE else self.template
        online = bool(self.allow_internet_access)
        return BorrowRequest(
            spec=SandboxSpec(image=image, env=self.env, network=online),
            network="allow" if online else "refuse",
            lease_s=lease_of(self.timeout),
            name=f"{_NAME_PREFIX}{idempotency_key}" if idempotency_key else "",
            labels=self.metadata,
        )


def lease_of(timeout: int) -> float:
    """Return a time to live as a lease, which has a minimum length."""
    return max(LEAST_LEASE_S, float(timeout))


class TimeoutOrder(Request):
    """`timeout` seconds from now on."""

    timeout: _Timeout = _TIMEOUT_S


class ConnectOrder(Request):
    """As `TimeoutOrder`, but only extends the time to live. The other fields are for paused sandboxes."""

    timeout: _Timeout = _TIMEOUT_S
    memory: bool | None = None
    auto_pause: Annotated[bool | None, Field(alias="autoPause")] = None


class RefreshOrder(Request):
    """As `TimeoutOrder`, in the form of earlier clients."""

    duration: _Timeout = _TIMEOUT_S


class ListingQuery(Request):
    """The sandboxes that have all of these labels, newest first, from a token on."""

    metadata: Name = ""
    state: Name = ""
    limit: Annotated[int, Field(ge=1, le=100)] = 100
    next_token: Annotated[Name, Field(alias="nextToken")] = ""
    order: Literal["", "desc"] = ""

    def labels(self) -> dict[str, str]:
        """Return the labels of the query. Raises InvalidRequest."""
        try:
            return dict(parse_qsl(self.metadata, keep_blank_values=True, strict_parsing=bool(self.metadata)))
        except ValueError:
            raise InvalidRequest("must be of the form name=value&name=value", field="metadata") from None

    @property
    def running(self) -> bool:
        """False for a query of paused sandboxes only: none is ever paused."""
        return not self.state or "running" in self.state.split(",")
