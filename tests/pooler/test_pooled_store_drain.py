"""The store's tests of a draining node, run through a PgBouncer in transaction mode."""

from __future__ import annotations

from tests.contract.store.test_store_drain import *  # noqa: F403
