"""A Postgres session belongs to one client only: one that a pooler passes on between transactions is refused."""

from __future__ import annotations

import pytest
from sqlalchemy import text

from farm.errors import InvalidRequest
from farm.store.database import Store


def test_session_used_by_another_client_is_refused(postgres_database: str) -> None:
    name = postgres_database.partition("?")[0].rpartition("/")[2]
    first = Store(postgres_database)
    # as a pooler would leave it: new sessions have the mark of earlier ones
    first.write(lambda c: c.execute(text(f"ALTER DATABASE {name} SET farm.session = 'in use'")))
    first.close()
    second = Store(postgres_database)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="pool_mode = session"):
            second.read(lambda c: c.execute(text("SELECT 1")).scalar_one())
    second.close()


def test_concurrent_clients_have_separate_sessions(postgres_database: str) -> None:
    stores = [Store(postgres_database) for _ in range(3)]
    for _ in range(2):
        for store in stores:
            assert store.read(lambda c: c.execute(text("SHOW lock_timeout")).scalar_one()) == "10s"
    for store in stores:
        store.close()
