"""The base of all tables: how Python's types become columns, and how constraints are named."""

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
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it as it stands
        float: Double(),
        dict[str, Any]: JSON(),
        list[dict[str, Any]]: JSON(),
        list[str]: JSON(),
    }


def short_text(length: int = 64) -> String:
    """Return the type of a column that holds an id or a name."""
    return String(length)
