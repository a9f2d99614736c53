"""The store's tests of rescoring, run through a PgBouncer in transaction mode."""

from __future__ import annotations

from tests.contract.store.test_store_rescore import *  # noqa: F403
