"""Numeric arrays as columns, in the form of `farm.records.packed_array`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import LargeBinary
from sqlalchemy.engine import Dialect
from sqlalchemy.types import TypeDecorator

from farm.records.packed_array import pack, unpack


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
