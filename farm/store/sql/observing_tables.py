"""The tables for observers: histograms, the progress of each batch in them, and the messages of webhooks."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, ForeignKeyConstraint, Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from farm.store.sql.declarative import Base, short_text
from farm.store.sql.sanitize import PlainText


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
    __table_args__ = (ForeignKeyConstraint(["batch_id"], ["batches.batch_id"], ondelete="CASCADE"),)

    batch_id: Mapped[str] = mapped_column(short_text(), primary_key=True)
    seq: Mapped[int]
    ended_seq: Mapped[int] = mapped_column(server_default=text("0"))
    ended: Mapped[list[Any]] = mapped_column(JSON(), server_default=text("'[]'"))


class OutboxRow(Base):
    """A webhook's message that its receiver has not accepted; `abandoned_at` is set once it is no longer retried."""

    __tablename__ = "outbox"
    __table_args__ = (Index("ix_outbox_due_at", "due_at"),)

    message_id: Mapped[str] = mapped_column(short_text(), primary_key=True)
    form: Mapped[str] = mapped_column(short_text())
    subject: Mapped[str] = mapped_column(PlainText())
    url: Mapped[str] = mapped_column(String(2000))
    n_tries: Mapped[int]
    error: Mapped[str] = mapped_column(PlainText(500))
    created_at: Mapped[float]
    due_at: Mapped[float]
    abandoned_at: Mapped[float | None]
