"""The rollout farm's public API: what a trainer imports."""

from farm.client import Farm, connect
from farm.errors import (
    Conflict,
    FarmError,
    FarmUnreachable,
    InvalidRequest,
    NotFound,
    Overloaded,
    RolloutError,
    ServiceError,
    StoreUnavailable,
    UnknownHandler,
    UsageError,
)
from farm.request import Archive, BatchRequest, Instance, Limits, SamplingParams, SandboxSpec
from farm.rollout import BatchStatus, Group, Outcome, Rollout, Stage, State
from farm.trajectory import Segment

__all__ = [
    "Archive",
    "BatchRequest",
    "BatchStatus",
    "Conflict",
    "Farm",
    "FarmError",
    "FarmUnreachable",
    "Group",
    "Instance",
    "InvalidRequest",
    "Limits",
    "NotFound",
    "Outcome",
    "Overloaded",
    "Rollout",
    "RolloutError",
    "SamplingParams",
    "SandboxSpec",
    "Segment",
    "ServiceError",
    "Stage",
    "State",
    "StoreUnavailable",
    "UnknownHandler",
    "UsageError",
    "connect",
]
