"""Groups of verbs beyond those of batches and engines: access, annotations, training runs."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from farm.callers import ADMIN_NAME, KEY_NAME, ApiKey, LoggedOrder, Scope
from farm.client.request_checks import checked
from farm.records.request import Instance
from farm.records.request_values import Request
from farm.records.scoring.annotation import Annotation, NewAnnotation
from farm.records.training_run import KeyedBatch, RecordedStep, SolveRate

_Most = Annotated[int, Field(ge=0, le=2**31 - 1)]

PART_BYTES = 4_000_000
"""Size of all parts but the last, which is shorter."""


def _key_name(name: str) -> str:
    if not re.fullmatch(KEY_NAME, name):
        raise ValueError("must have 1 to 64 of A-Z, a-z, 0-9, . _ @ and -, the first a letter or digit")
    if name == ADMIN_NAME:
        raise ValueError(f"{ADMIN_NAME} is reserved for the farm's own key, FARM_API_KEY or the one in FARM_HOME")
    return name


class NewKey(Request):
    """A request for a new key. Quotas of None: no limit."""

    name: Annotated[str, Field(json_schema_extra={"pattern": KEY_NAME}), AfterValidator(_key_name)]
    scopes: Annotated[list[Scope], Field(min_length=1, max_length=16)]
    max_open: _Most | None = None
    max_engines: _Most | None = None
    max_rate: Annotated[float, Field(gt=0, le=1e9)] | None = None


class LogPruning(Request):
    """A request to remove log entries older than this number of days."""

    days: Annotated[float, Field(ge=0, le=100_000)]


class AccessControl(ABC):
    """API keys and the audit log, which need the scope `admin`. Raises like the verbs of `Farm`, and Forbidden."""

    def add_key(
        self,
        name: str,
        scopes: Sequence[Scope | str],
        *,
        max_open: int | None = None,
        max_engines: int | None = None,
        max_rate: float | None = None,
    ) -> str:
        """Create a key and return its text, which is shown only once: the farm keeps its hash.

        Raises InvalidRequest, and Conflict if the name exists.
        """
        quotas = {"max_open": max_open, "max_engines": max_engines, "max_rate": max_rate}
        return self.add(checked(NewKey, {"name": name, "scopes": list(scopes), **quotas}))

    @abstractmethod
    def add(self, new: NewKey) -> str:
        """Create a key and return its text. Raises Conflict."""

    @abstractmethod
    def keys(self) -> Sequence[ApiKey]:
        """Return the keys by name, without their texts and without the farm's own."""

    @abstractmethod
    def revoke_key(self, name: str) -> None:
        """Revoke a key: within seconds every API refuses it. Raises NotFound."""

    @abstractmethod
    def orders(self, limit: int = 100, before: int | None = None) -> Sequence[LoggedOrder]:
        """Return the newest log entries, newest first, or the newest before that number; at most 1,000 at a time."""

    @abstractmethod
    def prune_orders(self, days: float) -> int:
        """Remove log entries older than `days`; return their number. The log keeps the newest 200,000 in any case."""


@dataclass(frozen=True, slots=True)
class ArchiveState:
    """The state of an upload: complete, or the numbers of the parts already stored."""

    whole: bool
    parts: Sequence[int] = ()


class Runs(ABC):
    """Stored training runs, used by `farm.collecting`. Raises like the verbs of `Farm`."""

    @abstractmethod
    def keyed_batches(self, keys: Sequence[str]) -> Sequence[KeyedBatch]:
        """Return the batches submitted with these idempotency keys, in their order; at most 1,000 keys."""

    @abstractmethod
    def instances(self, group_ids: Sequence[str]) -> Sequence[Instance]:
        """Return the instances of these groups as they were requested, in order, to be requested again.

        Raises NotFound; InvalidRequest for an instance with its own engine key, which is never shown.
        """

    @abstractmethod
    def record_step(self, run: str, step: int, record: Mapping[str, Any]) -> RecordedStep:
        """Record a step of a run unless it is recorded already. Returns the record that is stored.

        A second writer gets the first one's record. Raises Conflict if a later step is recorded and this one is not.
        """

    @abstractmethod
    def recorded_step(self, run: str, up_to: int | None = None) -> RecordedStep | None:
        """Return the record of the newest step of a run, at most `up_to`; None without one."""

    @abstractmethod
    def solve_rates(
        self,
        run: str,
        data_source: str,
        instance_ids: Sequence[str] | None = None,
        *,
        min_version: int | None = None,
        solved_at: float = 1.0,
    ) -> Sequence[SolveRate]:
        """Return how often a run's scored rollouts solved these instances (None: all of the run), by id.

        Solved is a reward of at least `solved_at`. With `min_version`, only rollouts count whose newest token was
        sampled by that version or a newer one, and none of weights without a number. Instances without a scored
        rollout are left out.
        """


class AnnotationLog(ABC):
    """Values about rollouts, each written once. Raises like the verbs of `Farm`."""

    @abstractmethod
    def write(self, producer: str, step: int, annotations: Sequence[NewAnnotation | Mapping[str, Any]]) -> int:
        """Write a producer's annotations for a step, all or none; return how many were new. See `Farm.annotate`."""

    @abstractmethod
    def of(self, rollout_id: str) -> Sequence[Annotation]:
        """Return the annotations of a rollout as they were written. Raises NotFound."""
