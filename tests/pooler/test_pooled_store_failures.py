"""The store's promises of failures, whose tests these are, behind a PgBouncer in transaction mode."""

from __future__ import annotations

from tests.contract.store.test_store_failures import *  # noqa: F403
