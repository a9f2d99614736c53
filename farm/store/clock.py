"""The database's own clock, so that leases do not depend on how well the nodes' clocks agree."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Double
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import GenericFunction


class db_now(GenericFunction[float]):  # noqa: N801 - reads as the SQL function it is
    """Seconds since the epoch, UTC, at the moment the statement runs."""

    type = Double()
    inherit_cache = True


@compiles(db_now, "sqlite")
def _sqlite(element: db_now, compiler: Any, **kw: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(db_now, "postgresql")
def _postgresql(element: db_now, compiler: Any, **kw: Any) -> str:
    return "CAST(extract(epoch from clock_timestamp()) AS double precision)"
