"""Records of a training run: its batches by key, the groups of each step, the solve rates of instances."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from farm.errors import InvalidRequest

RUN_NAME = r"^[A-Za-z0-9._:-]{1,64}$"


def check_run(run: str) -> None:
    """Raise InvalidRequest for an invalid name of a training run."""
    if not isinstance(run, str) or not re.fullmatch(RUN_NAME, run):
        raise InvalidRequest("must have 1 to 64 of A-Z, a-z, 0-9, '.', '_', ':' and '-'", field="run")


def check_own_key(instance_id: str, engine_key: str) -> None:
    """Raise InvalidRequest for an instance with its own engine key: it cannot be read to request the instance again.

    A key given as the name of a variable of the nodes can.
    """
    if engine_key not in ("", "none") and not engine_key.startswith("env:"):
        raise InvalidRequest(
            f"instance {instance_id!r} has one, which is never shown, so it cannot be requested again: "
            "name the engine in the request of the batch, or the key as env:NAME",
            field="engine_key",
        )


@dataclass(frozen=True, slots=True)
class KeyedBatch:
    """A batch with the idempotency key that it was submitted with.

    `cursor` is the number of the rollout that ended last, 0 without one: it increases with each.
    """

    key: str
    batch_id: str
    n_rollouts: int
    n_samples: int
    cursor: int
    metadata: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """The record of a step of a training run: written once, before the trainer gets the step, and never changed."""

    run: str
    step: int
    record: dict[str, Any]


@dataclass(frozen=True, slots=True)
class SolveRate:
    """Numbers of an instance's scored and solved rollouts, and their mean reward."""

    instance_id: str
    n_scored: int
    n_solved: int
    mean_reward: float

    @property
    def rate(self) -> float:
        return self.n_solved / self.n_scored
