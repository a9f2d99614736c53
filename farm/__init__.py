"""The rollout farm's public API, as a trainer imports it.

Names are loaded on first use, so `import farm` does not load database drivers, broker clients or array libraries.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farm.client.connect import connect as connect
    from farm.client.farm import Farm as Farm
    from farm.errors import Conflict as Conflict
    from farm.errors import FarmError as FarmError
    from farm.errors import FarmUnreachable as FarmUnreachable
    from farm.errors import InvalidRequest as InvalidRequest
    from farm.errors import NotFound as NotFound
    from farm.errors import Overloaded as Overloaded
    from farm.errors import RolloutError as RolloutError
    from farm.errors import ServiceError as ServiceError
    from farm.errors import StoreUnavailable as StoreUnavailable
    from farm.errors import UnknownHandler as UnknownHandler
    from farm.errors import UsageError as UsageError
    from farm.records.request import Archive as Archive
    from farm.records.request import BatchRequest as BatchRequest
    from farm.records.request import Instance as Instance
    from farm.records.request import Limits as Limits
    from farm.records.request import SamplingParams as SamplingParams
    from farm.records.request import SandboxSpec as SandboxSpec
    from farm.records.rollout import BatchStatus as BatchStatus
    from farm.records.rollout import BatchSummary as BatchSummary
    from farm.records.rollout import Group as Group
    from farm.records.rollout import Outcome as Outcome
    from farm.records.rollout import Rollout as Rollout
    from farm.records.rollout import Stage as Stage
    from farm.records.rollout import State as State
    from farm.records.scoring.annotation import Annotation as Annotation
    from farm.records.scoring.annotation import NewAnnotation as NewAnnotation
    from farm.records.trajectory import Segment as Segment

_NAMES = {
    "farm.client.connect": ("connect",),
    "farm.client.farm": ("Farm",),
    "farm.errors": (
        *("Conflict", "FarmError", "FarmUnreachable", "InvalidRequest", "NotFound", "Overloaded", "RolloutError"),
        *("ServiceError", "StoreUnavailable", "UnknownHandler", "UsageError"),
    ),
    "farm.records.request": ("Archive", "BatchRequest", "Instance", "Limits", "SamplingParams", "SandboxSpec"),
    "farm.records.rollout": ("BatchStatus", "BatchSummary", "Group", "Outcome", "Rollout", "Stage", "State"),
    "farm.records.scoring.annotation": ("Annotation", "NewAnnotation"),
    "farm.records.trajectory": ("Segment",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_MODULES)

if not TYPE_CHECKING:
    # hidden from type checkers: to them every misspelt name would be an `Any`
    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module 'farm' has no attribute {name!r}")
        value = getattr(import_module(_MODULES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
