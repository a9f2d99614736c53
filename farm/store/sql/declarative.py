"""The base class of all tables: mapping of Python types to columns, and names of constraints."""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, Double, MetaData, String
from sqlalchemy.orm import DeclarativeBase


class Base(DeclarativeBase):
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
