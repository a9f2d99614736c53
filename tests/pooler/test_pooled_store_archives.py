"""The store's tests of archives, run through a PgBouncer in transaction mode."""

from __future__ import annotations

from tests.contract.store.test_store_archives import *  # noqa: F403
