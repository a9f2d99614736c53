"""The tables: batches, rollouts and their results, attempts, deliveries, engines, nodes, leaders, keys, histograms.

Tables are created only by the Alembic migrations; the newest revision must equal this module. Times are seconds since
the epoch, UTC. Arrays are `Packed` (`farm.records.packed_array` documents the bytes).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import JSON, BigInteger, Double, ForeignKey, Index, LargeBinary, MetaData, String, Table, text
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from farm.records.packed_array import pack, unpack
from farm.store.sql.sanitize import PlainText


class Base(DeclarativeBase):
    __table__: ClassVar[Table]
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads this attribute
        float: Double(),
        dict[str, Any]: JSON(),
        list[dict[str, Any]]: JSON(),
        list[str]: JSON(),
    }


def short_text(length: int = 64) -> String:
    """Return the column type for ids and names."""
    return String(length)


class Packed(TypeDecorator[NDArray[Any]]):
    """A column of `pack`ed arrays with one of these element types."""

    impl = LargeBinary
    cache_ok = True

    def __init__(self, *dtypes: str) -> None:
        super().__init__()
        self.dtypes = tuple(map(np.dtype, dtypes))

    def process_bind_param(self, value: NDArray[Any] | None, dialect: Dialect) -> bytes | None:
        if value is None:
            return None
        if value.dtype not in self.dtypes:
            raise ValueError(f"this column stores arrays of {' or '.join(map(str, self.dtypes))}, not of {value.dtype}")
        return pack(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> NDArray[Any] | None:
        return None if value is None else unpack(value)


OfBatch = Annotated[str, mapped_column(short_text(), ForeignKey("batches.batch_id", ondelete="CASCADE"))]
OfRollout = Annotated[str, mapped_column(short_text(), ForeignKey("rollouts.rollout_id", ondelete="CASCADE"))]

_LIVE, _ENDED = text("finish_seq IS NULL"), text("finish_seq IS NOT NULL")
_SCORED, _ARCHIVED = text("reward IS NOT NULL"), text("archive <> ''")
_ZERO = text("0")


class Batch(Base):
    """One submitted batch. `last_seq` is the last end number; rollouts are numbered in the order in which they end.

    `awaits_position` names its protocol until its end has a position; an index finds the waiting ones, however many
    batches there ever were. `pruned` is the retention level (`farm.store.retention`), null if all is kept; `pruned_at`
    is the end of the pruning.
    """

    __tablename__ = "batches"

    batch_id: Mapped[str] = mapped_column(short_text(), primary_key=True)
    idempotency_key: Mapped[str | None] = mapped_column(String(200), unique=True)
    fingerprint: Mapped[str] = mapped_column(short_text())
    created_at: Mapped[float]
    n_samples: Mapped[int]
    n_rollouts: Mapped[int]
    last_seq: Mapped[int]
    priority: Mapped[int]
    max_attempts: Mapped[int]
    max_losses: Mapped[int] = mapped_column(server_default="10")
    quarantine_after: Mapped[int] = mapped_column(server_default="6")
    run: Mapped[str] = mapped_column(short_text(), server_default=text("''"))
    submitter: Mapped[str] = mapped_column(short_text(), server_default=text("''"))
    pinned: Mapped[int] = mapped_column(server_default=_ZERO)
    pruned: Mapped[str] = mapped_column(short_text(12), server_default=text("''"))
    pruned_at: Mapped[float | None]
    request: Mapped[dict[str, Any]]
    awaits_position: Mapped[str | None] = mapped_column(short_text(), index=True)


class InstanceRow(Base):
    """One problem of a batch, as it was submitted."""

    __tablename__ = "instances"
    __table_args__ = (Index("ix_instances_archive", "archive", sqlite_where=_ARCHIVED, postgresql_where=_ARCHIVED),)

    batch_id: Mapped[OfBatch] = mapped_column(primary_key=True)
    group_index: Mapped[int] = mapped_column(primary_key=True)
    data_source: Mapped[str] = mapped_column(short_text())
    instance_id: Mapped[str] = mapped_column(String(200))
    fields: Mapped[dict[str, Any]]
    archive: Mapped[str] = mapped_column(short_text(), server_default=text("''"))


class RolloutRow(Base):
    """One sample. `attempt` is the fencing token; `owner` holds it until `lease_expires_at`.

    `policy_outcome` is how the agent ended; `outcome` is how the rollout ended, once it has. `version_min` and
    `version_max` are the oldest and the newest weights that sampled it, where they have numbers; `n_restarts` counts
    runs that were abandoned because their weights had become too old. `n_failures` counts attempts that failed,
    `n_lost` those that were lost with a worker or a node: each has a budget of its own.
    """

    __tablename__ = "rollouts"

    rollout_id: Mapped[str] = mapped_column(short_text(), primary_key=True)
    batch_id: Mapped[OfBatch]
    group_index: Mapped[int]
    sample_index: Mapped[int]
    data_source: Mapped[str] = mapped_column(short_text())
    instance_id: Mapped[str] = mapped_column(String(200))

    stage: Mapped[str] = mapped_column(short_text(8))
    state: Mapped[str] = mapped_column(short_text(12))
    attempt: Mapped[int]
    n_failures: Mapped[int]
    n_lost: Mapped[int] = mapped_column(server_default=_ZERO)
    node: Mapped[str | None] = mapped_column(short_text(128))
    owner: Mapped[str | None] = mapped_column(short_text(200))
    lease_expires_at: Mapped[float | None]
    queued_at: Mapped[float]
    ready_at: Mapped[float]
    resend_at: Mapped[float]
    n_sends: Mapped[int]

    policy_outcome: Mapped[str | None] = mapped_column(short_text(32))
    outcome: Mapped[str | None] = mapped_column(short_text(32))
    submission: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    reward: Mapped[float | None]
    failure_kind: Mapped[str | None] = mapped_column(PlainText(32))
    failure_message: Mapped[str | None] = mapped_column(PlainText())
    n_turns: Mapped[int]
    n_response_tokens: Mapped[int]
    n_invalid_actions: Mapped[int] = mapped_column(server_default=_ZERO)
    n_mismatches: Mapped[int] = mapped_column(server_default=_ZERO)
    n_segments: Mapped[int] = mapped_column(server_default=_ZERO)
    n_restarts: Mapped[int] = mapped_column(server_default=_ZERO)
    version_min: Mapped[int | None]
    version_max: Mapped[int | None]
    submitted_at: Mapped[float]
    finished_at: Mapped[float | None]
    finish_seq: Mapped[int | None]

    __table_args__ = (
        Index("ix_rollouts_batch_id_group_index", "batch_id", "group_index", "sample_index"),
        Index(
            "ix_rollouts_batch_id_finish_seq", "batch_id", "finish_seq", sqlite_where=_ENDED, postgresql_where=_ENDED
        ),
        # scored rollouts by instance, for solve rates; a reward is set when a rollout ends, so an entry is written once
        Index("ix_rollouts_scored", "data_source", "instance_id", sqlite_where=_SCORED, postgresql_where=_SCORED),
        # open rollouts, by node, in the order of placement. Claims and advances change no indexed column, so Postgres
        # updates rows in place
        Index(
            "ix_rollouts_live",
            *("node", "batch_id", "group_index", "sample_index"),
            sqlite_where=_LIVE,
            postgresql_where=_LIVE,
        ),
        {"postgresql_with": {"fillfactor": 70}},
    )


class AttemptRow(Base):
    """One stage of one attempt, from the moment a worker claimed it."""

    __tablename__ = "attempts"

    rollout_id: Mapped[OfRollout] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    stage: Mapped[str] = mapped_column(short_text(8), primary_key=True)
    node: Mapped[str] = mapped_column(short_text(128))
    worker: Mapped[str] = mapped_column(short_text(200))
    queued_at: Mapped[float]
    started_at: Mapped[float]
    finished_at: Mapped[float | None]
    result: Mapped[str | None] = mapped_column(PlainText(32))
    error: Mapped[str | None] = mapped_column(PlainText())


class ModelCallRow(Base):
    """One request to an LLM. `prompt_ids` are those beyond the ids of call `prefix_call`, if it has one.

    `tools` are null if they are those of that call.
    `versions` are a list of {version, start, end}; `stop_reason` is a token id or a string; `images` are digests.
    """

    __tablename__ = "model_calls"

    rollout_id: Mapped[OfRollout] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    call_index: Mapped[int] = mapped_column(primary_key=True)
    messages: Mapped[list[dict[str, Any]]]
    response: Mapped[dict[str, Any]]
    observations: Mapped[list[dict[str, Any]]]
    finish_reason: Mapped[str] = mapped_column(PlainText(32))
    engine: Mapped[str] = mapped_column(String(500))
    policy_version: Mapped[str] = mapped_column(PlainText(64))
    sampling: Mapped[dict[str, Any]]
    started_at: Mapped[float]
    latency_s: Mapped[float]
    n_prompt_tokens: Mapped[int]
    n_response_tokens: Mapped[int]
    prefix_call: Mapped[int | None]
    tools: Mapped[list[dict[str, Any]] | None] = mapped_column(JSON(none_as_null=True))
    prompt_ids: Mapped[Any | None] = mapped_column(Packed("int32"))
    response_ids: Mapped[Any | None] = mapped_column(Packed("int32"))
    response_logprobs: Mapped[Any | None] = mapped_column(Packed("float32"))
    versions: Mapped[list[dict[str, Any]]] = mapped_column(server_default=text("'[]'"))
    stop_reason: Mapped[Any | None] = mapped_column(JSON(none_as_null=True))
    n_cached_tokens: Mapped[int | None]
    n_invalid: Mapped[int] = mapped_column(server_default=_ZERO)
    begins: Mapped[str] = mapped_column(PlainText(), server_default=text("''"))
    mismatch: Mapped[int | None]
    reward: Mapped[float | None]
    labels: Mapped[dict[str, Any]] = mapped_column(server_default=text("'{}'"))
    images: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))


class SegmentRow(Base):
    """One training row of the attempt that counts. `turn_rewards` are pairs of a position and a reward; null for none.

    `expert_stretches` are [begin, end, call, at], an `ExpertStretch` each; null if no call has experts. `images` are
    digests; null if it has none.
    """

    __tablename__ = "segments"

    rollout_id: Mapped[OfRollout] = mapped_column(primary_key=True)
    segment_index: Mapped[int] = mapped_column(primary_key=True)
    batch_id: Mapped[str] = mapped_column(short_text(), index=True)
    attempt: Mapped[int]
    prompt_ids: Mapped[Any] = mapped_column(Packed("int32"))
    response_ids: Mapped[Any] = mapped_column(Packed("int32"))
    response_mask: Mapped[Any] = mapped_column(Packed("uint8"))
    response_logprobs: Mapped[Any] = mapped_column(Packed("float32"))
    policy_versions: Mapped[Any] = mapped_column(Packed("int32"))
    mismatch: Mapped[int | None]
    turn_rewards: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    expert_stretches: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))
    images: Mapped[list[Any] | None] = mapped_column(JSON(none_as_null=True))


class RewardRow(Base):
    """A score; the newest score of a rollout is also in its row. `rewards` are all its rewards by name, `of_rows` those
    of single training rows; null for none.
    """

    __tablename__ = "rewards"

    rollout_id: Mapped[OfRollout] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[float]
    details: Mapped[dict[str, Any]]
    rewards: Mapped[dict[str, Any]] = mapped_column(server_default="{}")
    of_rows: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    evaluator: Mapped[str] = mapped_column(PlainText(64))
    created_at: Mapped[float]


class ArchiveRow(Base):
    """A complete uploaded task archive: the digest of its tar, and the time of its last upload."""

    __tablename__ = "archives"

    digest: Mapped[str] = mapped_column(short_text(), primary_key=True)
    n_bytes: Mapped[int] = mapped_column(BigInteger())
    n_parts: Mapped[int]
    uploaded_at: Mapped[float]


class ArchivePartRow(Base):
    """A part of a task archive, compressed."""

    __tablename__ = "archive_parts"

    digest: Mapped[str] = mapped_column(short_text(), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    n_bytes: Mapped[int]
    data: Mapped[bytes]
    uploaded_at: Mapped[float]


class EngineRow(Base):
    """An LLM server of the farm.

    `paused` and `version` are the order, `engine_paused` and `engine_version` the last state sent to the engine;
    orders are counted, `version_order` is the one that named the version, and `n_done` the last that was executed.
    `key` is sealed (`sealed_secrets`); `registrant` is the API key that added it, for its quota.
    `weights_path` is where servers find the weights `version`. `held_at` is the last heartbeat of the client whose
    weight update paused it; null if a person paused it.
    """

    __tablename__ = "engines"

    url: Mapped[str] = mapped_column(String(500), primary_key=True)
    model: Mapped[str] = mapped_column(String(200))
    key: Mapped[str] = mapped_column(String(1000))
    tokenizer: Mapped[str] = mapped_column(String(500), server_default="")
    tool_format: Mapped[str] = mapped_column(short_text(32), server_default="")
    state: Mapped[str] = mapped_column(short_text(12))
    added_by: Mapped[str] = mapped_column(short_text(128))
    registrant: Mapped[str] = mapped_column(short_text(), server_default=text("''"))
    added_at: Mapped[float]
    info: Mapped[dict[str, Any]] = mapped_column(server_default="{}")
    paused: Mapped[str] = mapped_column(short_text(8), server_default="")
    paused_by: Mapped[str] = mapped_column(String(200), server_default="")
    paused_at: Mapped[float | None]
    version: Mapped[str] = mapped_column(short_text(), server_default="")
    version_order: Mapped[int] = mapped_column(server_default=_ZERO)
    n_orders: Mapped[int] = mapped_column(server_default=_ZERO)
    n_done: Mapped[int] = mapped_column(server_default=_ZERO)
    engine_paused: Mapped[str] = mapped_column(short_text(8), server_default="")
    engine_version: Mapped[str] = mapped_column(short_text(), server_default="")
    failure: Mapped[str] = mapped_column(PlainText(1000), server_default="")
    weights_path: Mapped[str] = mapped_column(String(500), server_default="")
    held_at: Mapped[float | None]


class NamedWeightsRow(Base):
    """The weights that were last named to the engines of a model; the row outlives the engines."""

    __tablename__ = "named_weights"

    model: Mapped[str] = mapped_column(String(200), primary_key=True)
    version: Mapped[str] = mapped_column(short_text())
    weights_path: Mapped[str] = mapped_column(String(500))
    named_at: Mapped[float]


class EngineUserRow(Base):
    """A process that calls engines: its calls in flight, and the last order of each engine that it follows."""

    __tablename__ = "engine_users"

    owner: Mapped[str] = mapped_column(short_text(200), primary_key=True)
    uses: Mapped[dict[str, Any]]
    heartbeat_at: Mapped[float]


class NodeRow(Base):
    """One machine of the farm and its capacity.

    No rollout is placed on it until `out_of_service_until`, because too many failed there (`out_of_service_why`);
    `n_trips` counts such periods in a row.
    """

    __tablename__ = "nodes"

    node: Mapped[str] = mapped_column(short_text(128), primary_key=True)
    state: Mapped[str] = mapped_column(short_text(12))
    room: Mapped[int]
    init_slots: Mapped[int]
    run_slots: Mapped[int]
    eval_slots: Mapped[int]
    handlers: Mapped[list[str]]
    info: Mapped[dict[str, Any]]
    started_at: Mapped[float]
    heartbeat_at: Mapped[float]
    out_of_service_until: Mapped[float | None]
    out_of_service_why: Mapped[str] = mapped_column(PlainText(), server_default=text("''"))
    n_trips: Mapped[int] = mapped_column(server_default=_ZERO)
    instance: Mapped[str] = mapped_column(short_text(), server_default=text("''"))


class DeliveryRow(Base):
    """The cursor up to which a consumer of a batch, such as a trainer, has acknowledged rollouts."""

    __tablename__ = "deliveries"

    batch_id: Mapped[OfBatch] = mapped_column(primary_key=True)
    consumer: Mapped[str] = mapped_column(short_text(), primary_key=True)
    cursor: Mapped[int]
    acknowledged_at: Mapped[float]


class CollectedStepRow(Base):
    """The record of a step of a training run; written once."""

    __tablename__ = "collected_steps"

    run: Mapped[str] = mapped_column(short_text(), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    record: Mapped[dict[str, Any]]
    created_at: Mapped[float]


class LeaderRow(Base):
    """The leader of a role that only one process has at a time, such as dispatching."""

    __tablename__ = "leaders"

    role: Mapped[str] = mapped_column(short_text(32), primary_key=True)
    owner: Mapped[str] = mapped_column(short_text(200))
    expires_at: Mapped[float]


class EpochRow(Base):
    """The one row that identifies this store's history: `counter` only grows while `epoch` stays."""

    __tablename__ = "epochs"

    role: Mapped[str] = mapped_column(short_text(32), primary_key=True)
    epoch: Mapped[str] = mapped_column(short_text())
    counter: Mapped[int]


class ArtefactRow(Base):
    """An artefact of a tool call; `data` is compressed, `n_bytes` is the size before compression."""

    __tablename__ = "artefacts"

    rollout_id: Mapped[OfRollout] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(short_text(128), primary_key=True)
    media_type: Mapped[str] = mapped_column(PlainText(100))
    n_bytes: Mapped[int]
    data: Mapped[bytes]
    created_at: Mapped[float]


class CallExpertsRow(Base):
    """The experts of a call's tokens from `start` on, concatenated: `n_layers` * `top_k` ids for each token."""

    __tablename__ = "call_experts"

    rollout_id: Mapped[OfRollout] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    call_index: Mapped[int] = mapped_column(primary_key=True)
    start: Mapped[int]
    n_layers: Mapped[int]
    top_k: Mapped[int]
    ids: Mapped[Any] = mapped_column(Packed("uint8", "uint16"))


class AnnotationRow(Base):
    """A value of a trainer about a rollout, or about its training row `row`; -1 means the whole rollout."""

    __tablename__ = "annotations"

    rollout_id: Mapped[OfRollout] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(PlainText(64), primary_key=True)
    producer: Mapped[str] = mapped_column(PlainText(64), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    row: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[float | None]
    tokens: Mapped[Any] = mapped_column(Packed("float32"), nullable=True)
    created_at: Mapped[float]


_OPEN = text("ended_at IS NULL")


class BorrowedSandboxRow(Base):
    """A borrowed sandbox; it ends at `lease_expires_at` if it is not used.

    `url` is the address of its worker, once it runs, and `token` the key that this worker requires. `finished` is 1 if
    its borrower ended it. A borrower's name belongs to one open sandbox at a time.
    """

    __tablename__ = "borrowed_sandboxes"
    __table_args__ = (
        Index("ix_borrowed_sandboxes_name", "name", "created_at"),
        Index(
            "uq_borrowed_sandboxes_name", "borrower", "name", unique=True, sqlite_where=_OPEN, postgresql_where=_OPEN
        ),
        Index("ix_borrowed_sandboxes_node", "node", sqlite_where=_OPEN, postgresql_where=_OPEN),
        {"postgresql_with": {"fillfactor": 70}},
    )

    sandbox_id: Mapped[str] = mapped_column(short_text(), primary_key=True)
    borrower: Mapped[str] = mapped_column(short_text())
    name: Mapped[str | None] = mapped_column(String(200))
    fingerprint: Mapped[str] = mapped_column(short_text())
    priority: Mapped[int]
    request: Mapped[dict[str, Any]]
    node: Mapped[str | None] = mapped_column(short_text(128))
    url: Mapped[str] = mapped_column(String(500), server_default=text("''"))
    token: Mapped[str] = mapped_column(short_text())
    lease_s: Mapped[float]
    lease_expires_at: Mapped[float]
    created_at: Mapped[float]
    ended_at: Mapped[float | None]
    ended_why: Mapped[str] = mapped_column(PlainText(), server_default=text("''"))
    finished: Mapped[int] = mapped_column(server_default=_ZERO)


class ApiKeyRow(Base):
    """A named key of the API: the SHA-256 of its text, its scopes and its quotas."""

    __tablename__ = "api_keys"

    name: Mapped[str] = mapped_column(short_text(), primary_key=True)
    digest: Mapped[str] = mapped_column(short_text(), unique=True)
    scopes: Mapped[list[str]]
    max_open: Mapped[int | None]
    max_engines: Mapped[int | None]
    max_rate: Mapped[float | None]
    created_by: Mapped[str] = mapped_column(short_text())
    created_at: Mapped[float]


class AuditLogRow(Base):
    """One order of a caller; `mark` identifies the order, so that a repeated write is recognized."""

    __tablename__ = "audit_log"

    number: Mapped[int] = mapped_column(primary_key=True)
    mark: Mapped[str] = mapped_column(short_text(16), index=True)
    at: Mapped[float]
    by: Mapped[str] = mapped_column(short_text())
    verb: Mapped[str] = mapped_column(short_text(32))
    target: Mapped[str] = mapped_column(PlainText(500))
    details: Mapped[str] = mapped_column(PlainText(500))


class SecretKeyRow(Base):
    """The one row with the fingerprint of the key that secrets of this store are encrypted with."""

    __tablename__ = "secret_keys"

    role: Mapped[str] = mapped_column(short_text(32), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(short_text())


class HistogramRow(Base):
    """One histogram for one value of its label: the counts of its buckets, the last of them without an upper bound."""

    __tablename__ = "histograms"

    name: Mapped[str] = mapped_column(short_text(), primary_key=True)
    label: Mapped[str] = mapped_column(short_text(), primary_key=True)
    counts: Mapped[list[int]] = mapped_column(JSON())
    total: Mapped[float]


class MeasuredBatchRow(Base):
    """The number of a batch's last ended rollout in the histograms: `seq`.

    `ended` are the sums of the rollouts that ended up to number `ended_seq`, as `farm.store.rollout_counts`
    writes them: lists of stage, state, kind of failure, number, rewards, mismatches and invalid actions.
    """

    __tablename__ = "measured_batches"

    batch_id: Mapped[OfBatch] = mapped_column(primary_key=True)
    seq: Mapped[int]
    ended_seq: Mapped[int] = mapped_column(server_default=_ZERO)
    ended: Mapped[list[Any]] = mapped_column(JSON(), server_default=text("'[]'"))


class OutboxRow(Base):
    """A webhook's message that its receiver has not accepted; `abandoned_at` is set once it is no longer retried."""

    __tablename__ = "outbox"

    message_id: Mapped[str] = mapped_column(short_text(), primary_key=True)
    form: Mapped[str] = mapped_column(short_text())
    subject: Mapped[str] = mapped_column(PlainText())
    url: Mapped[str] = mapped_column(String(2000))
    n_tries: Mapped[int]
    error: Mapped[str] = mapped_column(PlainText(500))
    created_at: Mapped[float]
    due_at: Mapped[float] = mapped_column(index=True)
    abandoned_at: Mapped[float | None]


class TerminalPositionRow(Base):
    """The position of a batch of one, whose rollout has ended, in the order in which a protocol's clients receive it.

    Positions begin at 1 and grow by one. A position is assigned once the batch's end is visible to all. The position of
    a batch of which retention leaves nothing is not assigned again.
    """

    __tablename__ = "terminal_positions"

    protocol: Mapped[str] = mapped_column(short_text(), primary_key=True)
    position: Mapped[int] = mapped_column(primary_key=True)
    batch_id: Mapped[OfBatch] = mapped_column(unique=True)
