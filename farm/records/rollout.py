"""Records of rollouts: state, outcome, timing, rewards; and the counts and violations of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from farm.ids import group_id
from farm.records.trajectory import NO_VERSION, Segment, version_number


class Stage(StrEnum):
    """The three stages, in order; each has its own queue and worker pool."""

    INIT = "init"
    RUN = "run"
    EVAL = "eval"


class State(StrEnum):
    """The state of a rollout within its stage. The last three are final."""

    QUEUED = "queued"
    ACTIVE = "active"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL_STATES = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED})


class Outcome(StrEnum):
    """The end of a rollout. The first group is caused by the policy, the second by the farm, the third by neither.

    A stale rollout was dropped because its weights were too old: it is not scored, and never trains.
    """

    SUBMITTED = "submitted"
    ANSWERED = "answered"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    DEADLINE = "deadline"
    INVALID_ACTION = "invalid_action"
    REPEATING = "repeating"

    SANDBOX_ERROR = "sandbox_error"
    ENGINE_ERROR = "engine_error"
    EVALUATOR_ERROR = "evaluator_error"
    AGENT_ERROR = "agent_error"
    HANDLER_ERROR = "handler_error"
    LOST = "lost"

    CANCELLED = "cancelled"
    STALE = "stale"


POLICY_OUTCOMES = frozenset(
    {
        Outcome.SUBMITTED,
        Outcome.ANSWERED,
        Outcome.MAX_TURNS,
        Outcome.MAX_TOKENS,
        Outcome.CONTEXT_FULL,
        Outcome.DEADLINE,
        Outcome.INVALID_ACTION,
        Outcome.REPEATING,
    }
)


STEP_ENDS = frozenset({Outcome.ANSWERED, Outcome.SUBMITTED})
"""Outcomes by which the policy itself ends one step of a task with several; others end the whole rollout."""


def trainable(outcome: Outcome | None, reward: float | None) -> bool:
    """Return whether a rollout may train: the policy ended it and an evaluator scored it."""
    return outcome in POLICY_OUTCOMES and reward is not None


def is_too_old(version_min: int | None, newest: str, max_staleness: int | None) -> bool:
    """Return whether tokens of `version_min` are too old to train on, with `newest` as the current version.

    The same rule applies to running and collecting: the difference must not exceed `max_staleness`. Versions without a
    number are never too old, and nothing is if `max_staleness` is None.
    """
    now = version_number(newest)
    if max_staleness is None or version_min is None or now == NO_VERSION:
        return False
    return now - version_min > max_staleness


@dataclass(frozen=True, slots=True)
class Failure:
    """The cause of a failed attempt: `kind` as in `Outcome`, and one sentence for a person."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Timing:
    """One stage of one attempt. Times are seconds since the epoch, UTC; None if it did not get that far."""

    attempt: int
    stage: Stage
    queued_at: float
    started_at: float | None
    finished_at: float | None
    node: str | None
    result: str | None
    failure: Failure | None

    @property
    def queued_s(self) -> float | None:
        return None if self.started_at is None else self.started_at - self.queued_at

    @property
    def work_s(self) -> float | None:
        return None if self.started_at is None or self.finished_at is None else self.finished_at - self.started_at


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, median, 99th percentile and maximum, in seconds."""

    mean_s: float
    p50_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Queue and work times of one stage of a batch, over its `n` ended attempts."""

    stage: Stage
    n: int
    queued: Spread
    work: Spread


@dataclass(frozen=True, slots=True)
class Reward:
    """A score from an evaluator; `details` explain it. `rewards` are all its scores by name."""

    value: float
    details: dict[str, Any]
    evaluator: str
    created_at: float
    rewards: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sample in its current state.

    `n_turns`, `n_response_tokens` and `n_segments` describe a completed run: they are 0 for a rollout that was
    cancelled before, although its `segments` hold what was recorded. `n_mismatches` counts model calls whose prompt the
    engine saw differently, `n_restarts` the runs discarded because their weights became too old, `n_failures` the
    attempts that failed through the farm's fault, and `n_lost` those lost with a worker or a node. `version_min` and
    `version_max` are the oldest and newest weights that sampled it, if they have numbers.
    """

    rollout_id: str
    batch_id: str
    group_index: int
    sample_index: int
    data_source: str
    instance_id: str
    stage: Stage
    state: State
    attempt: int
    node: str | None
    outcome: Outcome | None
    reward: float | None
    failure: Failure | None
    n_turns: int
    n_response_tokens: int
    submitted_at: float
    finished_at: float | None
    finish_seq: int | None
    segments: tuple[Segment, ...] = ()
    n_invalid_actions: int = 0
    n_mismatches: int = 0
    n_segments: int = 0
    n_restarts: int = 0
    n_failures: int = 0
    n_lost: int = 0
    version_min: int | None = None
    version_max: int | None = None

    @property
    def trainable(self) -> bool:
        return trainable(self.outcome, self.reward)

    @property
    def cursor(self) -> int:
        """The position after which a stream of rollouts continues; 0 until it has ended."""
        return self.finish_seq or 0

    @property
    def group_id(self) -> str:
        return group_id(self.batch_id, self.group_index)


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one instance; all have ended."""

    group_id: str
    rollouts: tuple[Rollout, ...]

    @property
    def cursor(self) -> int:
        """The position after which a stream of groups continues."""
        return max(rollout.cursor for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class KeptArtefact:
    """An artefact without its bytes: `n_bytes` is its original size, `n_stored` its size in the store."""

    name: str
    media_type: str
    n_bytes: int
    n_stored: int
    attempt: int
    created_at: float


@dataclass(frozen=True, slots=True)
class BatchStatus:
    """Counts of a batch. `stages[stage][state]` counts unfinished rollouts, `failures[kind]` the failed ones.

    `stopped[stage][state]` counts rollouts that failed or were cancelled in a stage, and never reached the next.
    `n_mismatches` and `n_invalid_actions` are sums over its completed rollouts. `warnings` say why an unfinished batch
    may be stuck: engines that get no calls without intervention.
    """

    batch_id: str
    n_rollouts: int
    n_completed: int
    n_failed: int
    n_cancelled: int
    stages: dict[Stage, dict[State, int]]
    failures: dict[str, int]
    mean_reward: float | None
    created_at: float
    n_mismatches: int = 0
    n_invalid_actions: int = 0
    stopped: dict[Stage, dict[State, int]] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    submitter: str = ""
    """The key that it was submitted with, or the user with database access."""
    findings: tuple[str, ...] = ()
    """Lines about findings of `farm tasks attack` on its tasks, from before it was submitted."""

    @property
    def n_finished(self) -> int:
        return self.n_completed + self.n_failed + self.n_cancelled

    @property
    def done(self) -> bool:
        return self.n_finished >= self.n_rollouts


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """A batch as one line. `age_s` is by the store's clock; `mean_reward` is over completed rollouts, None without any.

    `state` is `queued` until a rollout has started, `active` until all have ended, and then `completed`, or `failed` or
    `cancelled` if none was completed.
    """

    batch_id: str
    state: State
    n_rollouts: int
    n_completed: int
    n_failed: int
    n_cancelled: int
    mean_reward: float | None
    created_at: float
    age_s: float
    priority: int
    data_sources: tuple[str, ...]
    submitter: str = ""


@dataclass(frozen=True, slots=True)
class Violation:
    """A violated invariant: the id of the rollout, group or batch, and a sentence about it."""

    id: str
    what: str

    def __str__(self) -> str:
        return f"{self.id}: {self.what}"


@dataclass(frozen=True, slots=True)
class Count:
    """Rollouts of a batch or a group by outcome; `n_in_flight` are queued or active."""

    id: str
    n_submitted: int
    n_completed: int
    n_failed: int
    n_cancelled: int
    n_in_flight: int

    @property
    def n_found(self) -> int:
        return self.n_completed + self.n_failed + self.n_cancelled + self.n_in_flight

    @property
    def holds(self) -> bool:
        """True if every submitted rollout is counted exactly once."""
        return self.n_submitted == self.n_found


@dataclass(frozen=True, slots=True)
class Conservation:
    """The counts of a batch and of each of its groups, in order."""

    batch: Count
    groups: tuple[Count, ...]

    @property
    def off(self) -> tuple[Count, ...]:
        """The counts that do not add up, the batch first."""
        return tuple(count for count in (self.batch, *self.groups) if not count.holds)
