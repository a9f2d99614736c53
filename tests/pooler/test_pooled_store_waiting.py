"""The store's promises of what is placed, whose tests these are, behind a PgBouncer in transaction mode."""

from __future__ import annotations

from tests.contract.store.test_store_waiting import *  # noqa: F403
