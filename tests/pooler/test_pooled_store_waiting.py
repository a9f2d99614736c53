"""The store's tests of placement, run through a PgBouncer in transaction mode."""

from __future__ import annotations

from tests.contract.store.test_store_waiting import *  # noqa: F403
