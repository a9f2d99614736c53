"""The table of the order in which clients of a protocol receive ended rollouts."""

from __future__ import annotations

from sqlalchemy import ForeignKeyConstraint
from sqlalchemy.orm import Mapped, mapped_column

from farm.store.sql.declarative import Base, short_text


def protocol_of(idempotency_key: str | None) -> str | None:
    """Return the key prefix of a protocol's batch, such as `agent-lightning:`; None for batches of no protocol."""
    name, colon, _ = (idempotency_key or "").partition(":")
    return f"{name}:" if colon and len(name) < 64 else None


class AwaitsPlace:
    """The column of a batch that names its protocol until its end has a place.

    An index on it finds the waiting ones, however many batches there ever were.
    """

    awaits_place: Mapped[str | None] = mapped_column(short_text(), index=True)


class TerminalPlaceRow(Base):
    """The place of a batch of one, whose rollout has ended, in the order in which clients of a protocol receive it.

    Places begin at 1 and grow by one. A place is assigned once the batch's end is visible to all. The place of a batch
    of which retention leaves nothing is not assigned again.
    """

    __tablename__ = "terminal_places"
    __table_args__ = (ForeignKeyConstraint(["batch_id"], ["batches.batch_id"], ondelete="CASCADE"),)

    protocol: Mapped[str] = mapped_column(short_text(), primary_key=True)
    place: Mapped[int] = mapped_column(primary_key=True)
    batch_id: Mapped[str] = mapped_column(short_text(), unique=True)
