"""The store's tests of transitions and batches, run through a PgBouncer in transaction mode."""

from __future__ import annotations

from tests.contract.store.test_store import *  # noqa: F403
