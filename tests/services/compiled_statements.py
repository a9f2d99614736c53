"""SQL statements that all stores of a test process compile once.

SQLAlchemy compiles a statement for each engine, and each of thousands of tests has a store, so an engine, of its own:
that took 7 % of the processor time of test processes.
"""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine

from farm.store.sql.database_sessions import engine_of


class _ByDialectName(dict[Any, Any]):
    """Compiled statements by the name of a dialect, instead of by the object that an engine has of its own."""

    def get(self, key: Any, default: Any = None) -> Any:
        dialect, *rest = key
        return super().get((dialect.name, *rest), default)

    def __setitem__(self, key: Any, compiled: Any) -> None:
        dialect, *rest = key
        super().__setitem__((dialect.name, *rest), compiled)


def share_compiled_statements() -> None:
    """Make the engines of all stores of this process share their compiled statements."""
    compiled = _ByDialectName()

    def sharing(url: str, n_connections: int | None) -> tuple[Engine, Any]:
        engine, file = engine_of(url, n_connections)
        engine.update_execution_options(compiled_cache=compiled)
        return engine, file

    pytest.MonkeyPatch().setattr("farm.store.database.engine_of", sharing)
