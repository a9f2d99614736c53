"""The tables: batches, instances, rollouts, attempts, calls, artefacts, segments, rewards, engines, nodes, leaders.

Tables come to be by the Alembic migrations only; this is what the newest of them must equal. Instants are seconds
since the epoch, UTC. Arrays are `Packed` (its module documents the bytes).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, Double, ForeignKeyConstraint, Index, MetaData, String, Text, text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from farm.store.packed import Packed


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it as it stands
        float: Double(),
        dict[str, Any]: JSON(),
        list[dict[str, Any]]: JSON(),
        list[str]: JSON(),
    }


_LIVE = text("finish_seq IS NULL")


def _key(length: int = 64) -> String:
    return String(length)


class Batch(Base):
    """What one submit asked for. `last_seq` numbers rollouts in the order in which they end."""

    __tablename__ = "batches"

    batch_id: Mapped[str] = mapped_column(_key(), primary_key=True)
    idempotency_key: Mapped[str | None] = mapped_column(String(200), unique=True)
    fingerprint: Mapped[str] = mapped_column(_key())
    created_at: Mapped[float]
    n_samples: Mapped[int]
    n_rollouts: Mapped[int]
    last_seq: Mapped[int]
    priority: Mapped[int]
    max_attempts: Mapped[int]
    request: Mapped[dict[str, Any]]


class InstanceRow(Base):
    """One problem of a batch, as it was submitted."""

    __tablename__ = "instances"
    __table_args__ = (ForeignKeyConstraint(["batch_id"], ["batches.batch_id"], ondelete="CASCADE"),)

    batch_id: Mapped[str] = mapped_column(_key(), primary_key=True)
    group_index: Mapped[int] = mapped_column(primary_key=True)
    data_source: Mapped[str] = mapped_column(_key())
    instance_id: Mapped[str] = mapped_column(String(200))
    fields: Mapped[dict[str, Any]]


class RolloutRow(Base):
    """One sample. `attempt` is the fencing token; `owner` holds it until `lease_expires_at`.

    `policy_outcome` is how the agent ended; `outcome` how the rollout did, once it has.
    """

    __tablename__ = "rollouts"

    rollout_id: Mapped[str] = mapped_column(_key(), primary_key=True)
    batch_id: Mapped[str] = mapped_column(_key())
    group_index: Mapped[int]
    sample_index: Mapped[int]
    data_source: Mapped[str] = mapped_column(_key())
    instance_id: Mapped[str] = mapped_column(String(200))

    stage: Mapped[str] = mapped_column(_key(8))
    state: Mapped[str] = mapped_column(_key(12))
    attempt: Mapped[int]
    n_failures: Mapped[int]
    node: Mapped[str | None] = mapped_column(_key(128))
    owner: Mapped[str | None] = mapped_column(_key(200))
    lease_expires_at: Mapped[float | None]
    queued_at: Mapped[float]
    ready_at: Mapped[float]
    ring_at: Mapped[float]
    n_rings: Mapped[int]

    policy_outcome: Mapped[str | None] = mapped_column(_key(32))
    outcome: Mapped[str | None] = mapped_column(_key(32))
    submission: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    reward: Mapped[float | None]
    failure_kind: Mapped[str | None] = mapped_column(_key(32))
    failure_message: Mapped[str | None] = mapped_column(Text)
    n_turns: Mapped[int]
    n_response_tokens: Mapped[int]
    submitted_at: Mapped[float]
    finished_at: Mapped[float | None]
    finish_seq: Mapped[int | None]

    __table_args__ = (
        ForeignKeyConstraint(["batch_id"], ["batches.batch_id"], ondelete="CASCADE"),
        Index("ix_rollouts_batch_id_group_index", "batch_id", "group_index", "sample_index"),
        Index("ix_rollouts_batch_id_finish_seq", "batch_id", "finish_seq"),
        # what has not ended, by node. Claims and advances change no indexed column, so Postgres writes them in place
        Index("ix_rollouts_live", "node", "batch_id", sqlite_where=_LIVE, postgresql_where=_LIVE),
        {"postgresql_with": {"fillfactor": 70}},
    )


class AttemptRow(Base):
    """One stage of one attempt, from the moment a worker claimed it."""

    __tablename__ = "attempts"
    __table_args__ = (ForeignKeyConstraint(["rollout_id"], ["rollouts.rollout_id"], ondelete="CASCADE"),)

    rollout_id: Mapped[str] = mapped_column(_key(), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    stage: Mapped[str] = mapped_column(_key(8), primary_key=True)
    node: Mapped[str] = mapped_column(_key(128))
    worker: Mapped[str] = mapped_column(_key(200))
    queued_at: Mapped[float]
    started_at: Mapped[float]
    finished_at: Mapped[float | None]
    result: Mapped[str | None] = mapped_column(_key(32))
    error: Mapped[str | None] = mapped_column(Text)


class ModelCallRow(Base):
    """One request to an LLM. `prompt_ids` are those beyond the ids of call `prefix_call`, if it has one."""

    __tablename__ = "model_calls"
    __table_args__ = (ForeignKeyConstraint(["rollout_id"], ["rollouts.rollout_id"], ondelete="CASCADE"),)

    rollout_id: Mapped[str] = mapped_column(_key(), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    call_index: Mapped[int] = mapped_column(primary_key=True)
    messages: Mapped[list[dict[str, Any]]]
    response: Mapped[dict[str, Any]]
    observations: Mapped[list[dict[str, Any]]]
    finish_reason: Mapped[str] = mapped_column(_key(32))
    engine: Mapped[str] = mapped_column(String(500))
    policy_version: Mapped[str] = mapped_column(_key())
    sampling: Mapped[dict[str, Any]]
    started_at: Mapped[float]
    latency_s: Mapped[float]
    n_prompt_tokens: Mapped[int]
    n_response_tokens: Mapped[int]
    prefix_call: Mapped[int | None]
    prompt_ids: Mapped[Any | None] = mapped_column(Packed("int32"))
    response_ids: Mapped[Any | None] = mapped_column(Packed("int32"))
    response_logprobs: Mapped[Any | None] = mapped_column(Packed("float32"))


class ArtefactRow(Base):
    """What a tool call made beside its observation; `data` is compressed, `n_bytes` counts what it was made of."""

    __tablename__ = "artefacts"
    __table_args__ = (ForeignKeyConstraint(["rollout_id"], ["rollouts.rollout_id"], ondelete="CASCADE"),)

    rollout_id: Mapped[str] = mapped_column(_key(), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(_key(128), primary_key=True)
    media_type: Mapped[str] = mapped_column(String(100))
    n_bytes: Mapped[int]
    data: Mapped[bytes]
    created_at: Mapped[float]


class SegmentRow(Base):
    """One training row of the attempt that counts."""

    __tablename__ = "segments"
    __table_args__ = (
        ForeignKeyConstraint(["rollout_id"], ["rollouts.rollout_id"], ondelete="CASCADE"),
        Index("ix_segments_batch_id", "batch_id"),
    )

    rollout_id: Mapped[str] = mapped_column(_key(), primary_key=True)
    segment_index: Mapped[int] = mapped_column(primary_key=True)
    batch_id: Mapped[str] = mapped_column(_key())
    attempt: Mapped[int]
    prompt_ids: Mapped[Any] = mapped_column(Packed("int32"))
    response_ids: Mapped[Any] = mapped_column(Packed("int32"))
    response_mask: Mapped[Any] = mapped_column(Packed("uint8"))
    response_logprobs: Mapped[Any] = mapped_column(Packed("float32"))
    policy_versions: Mapped[Any] = mapped_column(Packed("int32"))


class RewardRow(Base):
    """A score; the newest of a rollout is the one on its row."""

    __tablename__ = "rewards"
    __table_args__ = (ForeignKeyConstraint(["rollout_id"], ["rollouts.rollout_id"], ondelete="CASCADE"),)

    rollout_id: Mapped[str] = mapped_column(_key(), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[float]
    details: Mapped[dict[str, Any]]
    evaluator: Mapped[str] = mapped_column(_key())
    created_at: Mapped[float]


class EngineRow(Base):
    """An LLM server that may be used."""

    __tablename__ = "engines"

    url: Mapped[str] = mapped_column(String(500), primary_key=True)
    model: Mapped[str] = mapped_column(String(200))
    key: Mapped[str] = mapped_column(String(500))
    state: Mapped[str] = mapped_column(_key(12))
    added_by: Mapped[str] = mapped_column(_key(128))
    added_at: Mapped[float]


class NodeRow(Base):
    """One machine of the farm and what it has room for."""

    __tablename__ = "nodes"

    node: Mapped[str] = mapped_column(_key(128), primary_key=True)
    state: Mapped[str] = mapped_column(_key(12))
    room: Mapped[int]
    init_slots: Mapped[int]
    run_slots: Mapped[int]
    eval_slots: Mapped[int]
    handlers: Mapped[list[str]]
    info: Mapped[dict[str, Any]]
    started_at: Mapped[float]
    heartbeat_at: Mapped[float]


class LeaderRow(Base):
    """Who may do what only one process does at a time, such as dispatching."""

    __tablename__ = "leaders"

    role: Mapped[str] = mapped_column(_key(32), primary_key=True)
    owner: Mapped[str] = mapped_column(_key(200))
    expires_at: Mapped[float]
