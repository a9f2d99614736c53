"""The store's promises of scoring again, whose tests these are, behind a PgBouncer in transaction mode."""

from __future__ import annotations

from tests.contract.store.test_store_rescore import *  # noqa: F403
