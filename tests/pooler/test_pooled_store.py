"""The store's promises of transitions and batches, whose tests these are, behind a PgBouncer in transaction mode."""

from __future__ import annotations

from tests.contract.store.test_store import *  # noqa: F403
