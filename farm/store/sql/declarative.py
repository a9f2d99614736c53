"""The base class of all tables: types of columns, names of constraints, and columns of numeric arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import JSON, Double, LargeBinary, MetaData, String
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.types import TypeDecorator

from farm.records.packed_array import pack, unpack


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
