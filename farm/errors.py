"""All errors raised by the farm.

FarmError
├── UsageError        the caller can fix it: 4xx, never retried
│   ├── InvalidRequest    a field is missing or wrong; `field` names it
│   ├── UnknownHandler    no handler for this data_source
│   ├── NotFound          no batch, rollout or plug-in with that name
│   ├── Conflict          exists already with other content
│   ├── NotAllowed        valid, but not possible from here or now
│   │   └── Forbidden         the caller's key does not allow it
│   ├── Pruned            removed by retention
│   ├── SandboxEnded      the borrowed sandbox no longer exists
│   └── NotInstalled      required packages are not installed here
├── ServiceError      the farm's fault: 503, try again
│   ├── StoreUnavailable
│   ├── BrokerUnavailable
│   ├── FarmUnreachable
│   ├── Overloaded        too many open rollouts or sandboxes
│   └── NoTrainableRollouts   none in a trainer's step
└── RolloutError      recorded on the rollout, never leaves a stage
    ├── SandboxError, EngineError, EvaluatorError      the farm's fault: retried
    │   ├── ImageError        SandboxError: an image is missing or broken; retried only if `retryable`
    │   └── LayerMissing      EvaluatorError: the layer that scoring needs was too large to keep; never retried
    ├── StaleRollout       not a failure: its weights are too old
    └── AgentError, HandlerError                       a bug in a plug-in: retried, HandlerError only if `retryable`
        └── AgentMissing      AgentError: the agent is not available on this node
ToolError             text for the model; the rollout continues
LimitReached          control flow: ends the agent's loop with an outcome
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from farm.records.rollout import Outcome


class FarmError(Exception):
    """The root: `except FarmError` catches every error that the farm raises on purpose."""


class UsageError(FarmError):
    """The caller can fix it. `status` is its HTTP status."""

    status: ClassVar[int] = 400


class InvalidRequest(UsageError):
    """A field of a request is missing or wrong; `field` is its path, such as `instances[3].fields.answer`.

    `complaints` are all faults of the request as (field, message); the first is the error's own.
    """

    def __init__(self, message: str, *, field: str = "", more: Sequence[tuple[str, str]] = ()) -> None:
        self.complaints = ((field, message), *more)
        super().__init__("; ".join(f"{path}: {text}" if path else text for path, text in self.complaints))
        self.field = field

    @classmethod
    def of(cls, complaints: Sequence[tuple[str, str]]) -> InvalidRequest:
        """Return the error for at least one complaint."""
        (field, message), *more = complaints
        return cls(message, field=field, more=more)

    def renamed(self, name_of: Callable[[str], str]) -> InvalidRequest:
        """Return the error with another name for each field."""
        return InvalidRequest.of([(name_of(field), message) for field, message in self.complaints])


class UnknownHandler(UsageError):
    """No handler is installed for the instance's data_source."""


class NotFound(UsageError):
    """No such batch, rollout, engine or plug-in."""

    status = 404


class Conflict(UsageError):
    """The name or key already exists with different content."""

    status = 409


class StoreWentBack(Conflict):
    """The store is older than what the caller has seen, e.g. a restored backup: newer data is lost."""


class NotAllowed(UsageError):
    """Valid, but not possible in this state or from here."""

    status = 403


class Forbidden(NotAllowed):
    """Not allowed by the scopes of the caller's key, or by its limit of engines."""


class Pruned(UsageError):
    """Removed by retention or `farm prune`, a while after its rollout ended; its reward may still exist."""

    status = 410


class SandboxEnded(UsageError):
    """A borrowed sandbox has ended: it was stopped, its lease expired, or its node was lost. The message says which."""

    status = 410


class NotInstalled(UsageError):
    """Required packages are not installed here; the message names the extra that installs them."""


class ServiceError(FarmError):
    """The farm's fault; the same call may succeed later."""

    status: ClassVar[int] = 503


class StoreUnavailable(ServiceError):
    """The database cannot be reached, or its schema revision differs from this code's."""


class StoreGone(StoreUnavailable):
    """The database file in use was removed or replaced. Waiting does not help."""


class BrokerUnavailable(ServiceError):
    """The broker cannot be reached."""


class FarmUnreachable(ServiceError):
    """No farm answers at this address."""


class Overloaded(ServiceError):
    """The farm has as many unfinished rollouts or borrowed sandboxes as it takes; some of them have to end first."""


class NoTrainableRollouts(ServiceError):
    """All rollouts of a trainer's step failed, were cancelled or became stale; the message counts them by outcome."""


class RolloutError(FarmError):
    """Ended an attempt. `kind` is the outcome if no attempt is left; `retryable` says if another may succeed."""

    kind: ClassVar[str] = "agent_error"
    retryable: bool = True


class SandboxError(RolloutError):
    """The sandbox did not start, or failed during the rollout."""

    kind = "sandbox_error"


class ImageError(SandboxError):
    """An image is missing, broken or could not be built; `lines` are the builder's last lines, if one ran.

    `retryable` is True only if the disk, the network or a timeout was the cause: a missing or broken image stays so.
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
    """No engine has the farm's current weights: the rollout is released, which does not count as a failed attempt."""


class StaleRollout(RolloutError):
    """The weights are newer than its batch allows. `restart`: it restarts, which does not count as a failed attempt."""

    kind = "stale"
    retryable = False

    def __init__(self, message: str, *, restart: bool) -> None:
        super().__init__(message)
        self.restart = restart


class EvaluatorError(RolloutError):
    """Scoring failed; says nothing about the policy."""

    kind = "evaluator_error"


class LayerMissing(EvaluatorError):
    """The rollout's layer was too large to keep beyond the first scoring, and was lost with its node."""

    retryable = False


class AgentError(RolloutError):
    """The agent failed, not because of the policy; `retryable` is False if another attempt would fail alike."""

    kind = "agent_error"

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class AgentMissing(AgentError):
    """The agent is not available on this node: not installed, not importable, or not a valid agent.

    The instance is not the cause.
    """


class HandlerError(RolloutError):
    """The handler failed, or cannot run the instance it was given (then `retryable` is False)."""

    kind = "handler_error"

    def __init__(self, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.retryable = retryable


class ToolError(FarmError):
    """A tool's error message for the model: the mistake, and the correction."""


class LimitReached(FarmError):
    """A limit of the rollout is reached; `outcome` is the rollout's outcome."""

    def __init__(self, outcome: Outcome, message: str) -> None:
        super().__init__(message)
        self.outcome = outcome
