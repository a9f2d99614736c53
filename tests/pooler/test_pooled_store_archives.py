"""The store's promises of archives, whose tests these are, behind a PgBouncer in transaction mode."""

from __future__ import annotations

from tests.contract.store.test_store_archives import *  # noqa: F403
