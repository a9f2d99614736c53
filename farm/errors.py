"""Every error the farm raises.

FarmError
├── UsageError        the caller can mend it: 4xx, never retried
│   ├── InvalidRequest    a field is missing or wrong; `field` names it
│   ├── UnknownHandler    no handler for this data_source
│   ├── NotFound          no batch, rollout or plug-in of that name
│   ├── Conflict          it exists already and is different
│   ├── NotAllowed        understood, but not from here or not now
│   │   └── Forbidden         the key that was shown does not allow it
│   ├── Pruned            it was there, and retention has removed it
│   ├── SandboxEnded      a borrowed sandbox that is not there any more
│   └── NotInstalled      needs packages that are not installed here
├── ServiceError      the farm's fault: 503, try again
│   ├── StoreUnavailable
│   ├── BrokerUnavailable
│   ├── FarmUnreachable
│   ├── Overloaded        as many rollouts are open as are taken
│   └── NoTrainableRollouts   none of a trainer's step
└── RolloutError      recorded on the rollout, never leaves a stage
    ├── SandboxError, EngineError, EvaluatorError      ours: tried again
    │   ├── ImageError        of SandboxError: an image is missing or broken; tried again only if it says so
    │   └── LayerMissing      of EvaluatorError: scoring needs a layer that was too large to be kept; never tried again
    ├── StaleRollout       no failure: newer weights have overtaken it
    └── AgentError, HandlerError                       a bug in a plug-in: tried again, HandlerError only if it says so
        └── AgentMissing      of AgentError: it cannot be had on this node
ToolError             text for the model; the rollout goes on
LimitReached          control flow: ends the agent's loop with an outcome
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farm.records.rollout import Outcome


class FarmError(Exception):
    """The root: `except FarmError` catches all that the farm raises on purpose."""


class UsageError(FarmError):
    """The caller can mend it. `status` is the HTTP status it maps to."""

    status: ClassVar[int] = 400


class InvalidRequest(UsageError):
    """A field of a request is missing or wrong; `field` is its path, such as `instances[3].fields.answer`.

    `complaints` are all that is wrong with a request, as (field, message), the first of them the error's own.
    """

    def __init__(self, message: str, *, field: str = "", more: Sequence[tuple[str, str]] = ()) -> None:
        self.complaints = ((field, message), *more)
        super().__init__("; ".join(f"{place}: {text}" if place else text for place, text in self.complaints))
        self.field = field

    @classmethod
    def of(cls, complaints: Sequence[tuple[str, str]]) -> InvalidRequest:
        """Return the error of these complaints, of which there is at least one."""
        (field, message), *more = complaints
        return cls(message, field=field, more=more)


class UnknownHandler(UsageError):
    """No handler is installed for the instance's data_source."""


class NotFound(UsageError):
    """No such batch, rollout, engine or plug-in."""

    status = 404


class Conflict(UsageError):
    """The same key names something else already."""

    status = 409


class StoreWentBack(Conflict):
    """The store is an older one than the caller has seen, such as a restored backup: newer data is lost."""


class NotAllowed(UsageError):
    """Understood, but not possible in this state or from here."""

    status = 403


class Forbidden(NotAllowed):
    """The scopes of the key that was shown, or the number of engines that it may have, do not allow it."""


class Pruned(UsageError):
    """Removed by retention or `farm prune`, as long as its rollout ended before; its reward may be there still."""

    status = 410


class SandboxEnded(UsageError):
    """A borrowed sandbox has ended: it was stopped, its lease ran out, or its node was lost. The message says which."""

    status = 410


class NotInstalled(UsageError):
    """Needs packages that are not installed here; the message names the extra that brings them."""


class ServiceError(FarmError):
    """The farm's fault; the same call may succeed later."""

    status: ClassVar[int] = 503


class StoreUnavailable(ServiceError):
    """The database cannot be reached, or is not at the schema revision of this code."""


class StoreGone(StoreUnavailable):
    """The database that was in use is not there any more: its file was removed or replaced. Waiting does not help."""


class BrokerUnavailable(ServiceError):
    """The broker cannot be reached."""


class FarmUnreachable(ServiceError):
    """There is no farm at this address."""


class Overloaded(ServiceError):
    """As many rollouts have been submitted and have not ended as the farm takes; some of them have to end first."""


class NoTrainableRollouts(ServiceError):
    """All rollouts of a trainer's step broke, or were cancelled or overtaken; the message counts them by outcome."""


class RolloutError(FarmError):
    """Ended an attempt. `kind` is the outcome once no attempt is left; `retryable` says if another may help."""

    kind: ClassVar[str] = "agent_error"
    retryable: bool = True


class SandboxError(RolloutError):
    """The sandbox did not start, or broke under the rollout."""

    kind = "sandbox_error"


class ImageError(SandboxError):
    """An image is missing, broken or could not be built; `lines` are the builder's last, if one ran.

    `retryable` is False, as what is missing or broken stays so; True if it was the disk, the network or the clock.
    """

    def __init__(self, message: str, lines: Sequence[str] = (), *, retryable: bool = False) -> None:
        super().__init__(": ".join(part for part in (message, " | ".join(lines)) if part))
        self.message = message
        self.lines = tuple(lines)
        self.retryable = retryable


class EngineError(RolloutError):
    """The LLM server failed or could not be reached."""

    kind = "engine_error"


class WeightsMissing(EngineError):
    """No engine has the weights that the farm plays with: the rollout is handed back, which is no failed attempt."""


class StaleRollout(RolloutError):
    """The weights moved on further than its batch allows. `restart`: it is restarted, which is no failed attempt."""

    kind = "stale"
    retryable = False

    def __init__(self, message: str, *, restart: bool) -> None:
        super().__init__(message)
        self.restart = restart


class EvaluatorError(RolloutError):
    """Scoring itself broke; says nothing about the policy."""

    kind = "evaluator_error"


class LayerMissing(EvaluatorError):
    """The layer that the policy left was too large to be kept beyond the first scoring, and is gone with its node."""

    retryable = False


class AgentError(RolloutError):
    """The agent broke, which is no action of the policy; `retryable` is False where another attempt breaks alike."""

    kind = "agent_error"

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class AgentMissing(AgentError):
    """The agent cannot be had on this node: not installed, not imported, or what it brings is not what it should be.

    No instance has a part in that.
    """


class HandlerError(RolloutError):
    """The handler broke, or was given an instance it cannot play (then `retryable` is False)."""

    kind = "handler_error"

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class ToolError(FarmError):
    """A tool's complaint, worded for the model: what was wrong and what to change."""


class LimitReached(FarmError):
    """A limit of the rollout is used up; `outcome` is how the rollout ends."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome
