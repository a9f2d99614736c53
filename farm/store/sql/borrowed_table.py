"""The table of borrowed sandboxes."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from farm.store.sql.declarative import Base, short_text
from farm.store.sql.sanitize import PlainText

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
    finished: Mapped[int] = mapped_column(server_default=text("0"))
