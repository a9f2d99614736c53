"""The store's promises of a node that drains, whose tests these are, behind a PgBouncer in transaction mode."""

from __future__ import annotations

from tests.contract.store.test_store_drain import *  # noqa: F403
