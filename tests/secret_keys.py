"""The secret key of a test's store, by the settings of this process."""

from __future__ import annotations

from farm.settings import settings
from farm.store.access.sealed_secrets import SecretKey
from farm.store.database import Store


def key_of(store: Store) -> SecretKey:
    return SecretKey.of(settings(), store.engine.url)
