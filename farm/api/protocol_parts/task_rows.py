"""Rows of data sets as instances of the farm: some handlers read them unchanged, others have fields of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from farm.client.request_checks import HANDLERS
from farm.errors import UnknownHandler
from farm.plugins import installed

ROW_READERS = frozenset({"answer", "programs", "swe-bench"})
"""Handlers that read a data set's row unchanged, and drop the columns that are not about the problem."""


def known_handler(name: str, others: Collection[str] = ()) -> str:
    """Return the name of a handler. Raises UnknownHandler, naming the known ones, and `others`."""
    if name in installed(HANDLERS):
        return name
    known = ", ".join(sorted({*others, *installed(HANDLERS)}))
    raise UnknownHandler(f"Invalid dataset type or function not registered: {name!r}; known are: {known}")


def columns_without(row: Mapping[str, Any], dropped: Collection[str]) -> dict[str, Any]:
    """Return the row without some columns."""
    return {name: value for name, value in row.items() if name not in dropped}
