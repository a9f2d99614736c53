"""The store's tests of failures, run through a PgBouncer in transaction mode."""

from __future__ import annotations

from tests.contract.store.test_store_failures import *  # noqa: F403
