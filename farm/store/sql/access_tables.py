"""The tables of API keys and of the audit log: permissions and orders."""

from __future__ import annotations

from sqlalchemy import Index
from sqlalchemy.orm import Mapped, mapped_column

from farm.store.sql.declarative import Base, short_text
from farm.store.sql.sanitize import PlainText


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
    __table_args__ = (Index("ix_audit_log_mark", "mark"),)

    number: Mapped[int] = mapped_column(primary_key=True)
    mark: Mapped[str] = mapped_column(short_text(16))
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
