"""The tables of data that accompanies model calls, and is read only on request."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ForeignKeyConstraint
from sqlalchemy.orm import Mapped, mapped_column

from farm.store.sql.array_column import Packed
from farm.store.sql.declarative import Base, short_text
from farm.store.sql.sanitize import PlainText


class ArtefactRow(Base):
    """An artefact of a tool call; `data` is compressed, `n_bytes` is the size before compression."""

    __tablename__ = "artefacts"
    __table_args__ = (ForeignKeyConstraint(["rollout_id"], ["rollouts.rollout_id"], ondelete="CASCADE"),)

    rollout_id: Mapped[str] = mapped_column(short_text(), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(short_text(128), primary_key=True)
    media_type: Mapped[str] = mapped_column(PlainText(100))
    n_bytes: Mapped[int]
    data: Mapped[bytes]
    created_at: Mapped[float]


class CallExpertsRow(Base):
    """The experts of a call's tokens from `start` on, concatenated: `n_layers` * `top_k` ids for each token."""

    __tablename__ = "call_experts"
    __table_args__ = (ForeignKeyConstraint(["rollout_id"], ["rollouts.rollout_id"], ondelete="CASCADE"),)

    rollout_id: Mapped[str] = mapped_column(short_text(), primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    call_index: Mapped[int] = mapped_column(primary_key=True)
    start: Mapped[int]
    n_layers: Mapped[int]
    top_k: Mapped[int]
    ids: Mapped[Any] = mapped_column(Packed("uint8", "uint16"))


class AnnotationRow(Base):
    """A value of a trainer about a rollout, or about its training row `row`; -1 means the whole rollout."""

    __tablename__ = "annotations"
    __table_args__ = (ForeignKeyConstraint(["rollout_id"], ["rollouts.rollout_id"], ondelete="CASCADE"),)

    rollout_id: Mapped[str] = mapped_column(short_text(), primary_key=True)
    name: Mapped[str] = mapped_column(PlainText(64), primary_key=True)
    producer: Mapped[str] = mapped_column(PlainText(64), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    row: Mapped[int] = mapped_column(primary_key=True)
    value: Mapped[float | None]
    tokens: Mapped[Any] = mapped_column(Packed("float32"), nullable=True)
    created_at: Mapped[float]
