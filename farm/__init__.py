"""The rollout farm's public API: what a trainer imports."""

from farm.client import Farm, connect
from farm.errors import FarmError, RolloutError, ServiceError, UsageError
from farm.request import Archive, BatchRequest, Instance, Limits, SamplingParams, SandboxSpec
from farm.rollout import BatchStatus, Group, Outcome, Rollout, Stage, State
from farm.trajectory import Segment

__all__ = [
    "Archive",
    "BatchRequest",
    "BatchStatus",
    "Farm",
    "FarmError",
    "Group",
    "Instance",
    "Limits",
    "Outcome",
    "Rollout",
    "RolloutError",
    "SamplingParams",
    "SandboxSpec",
    "Segment",
    "ServiceError",
    "Stage",
    "State",
    "UsageError",
    "connect",
]
