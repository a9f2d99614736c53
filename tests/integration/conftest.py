"""Fixtures of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import absent
from tests.contract.sandboxes.sandbox_kinds import farm_in
from tests.services.farms import farm_folder
from workers.sandboxes.namespace import NamespaceProvider
from workers.sandboxes.remove_tree import remove


@pytest.fixture
def provider() -> Iterator[NamespaceProvider]:
    """Yield a provider of sandboxes in this test's own farm."""
    with farm_folder() as folder, farm_in(folder):
        namespace_provider = NamespaceProvider()
        if missing := namespace_provider.missing():
            absent(missing)
        yield namespace_provider
        # this must come before it is deleted like an ordinary folder, which it is not
        remove(folder)
