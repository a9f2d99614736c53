"""API keys and the audit log, on a store."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial

from sqlalchemy.exc import IntegrityError

from farm.callers import ApiKey, LoggedOrder, current_caller, sorted_scopes
from farm.client.access.access_control import AccessControl, LogPruning, NewKey
from farm.client.request_checks import checked
from farm.errors import NotFound
from farm.store.access import api_keys, audit_log
from farm.store.access.audit_log import logged
from farm.store.database import Store


class LocalAccess(AccessControl):
    """The verbs on a store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def add(self, new: NewKey) -> str:
        scopes = sorted_scopes(new.scopes)
        key = ApiKey(new.name, scopes, new.max_open, new.max_engines, new.max_rate, current_caller().name)
        text = f"rf-{secrets.token_urlsafe(32)}"
        add = partial(api_keys.add, key=key, digest=api_keys.digest_of(text.encode()))
        details = ", ".join(scope.value for scope in key.scopes)
        write = logged(add, "keys add", key.name, details)
        try:
            self._store.write(write)
        except IntegrityError:  # another process created the name at the same moment; now it can be read
            self._store.write(write)
        return text

    def keys(self) -> Sequence[ApiKey]:
        return self._store.read(api_keys.listing)

    def revoke_key(self, name: str) -> None:
        revoke = partial(api_keys.revoke, name=name)
        work = logged(revoke, "keys revoke", name, done=bool)
        # an earlier try may have done it already: the answer to a commit can be lost
        was_there: list[bool] = []
        self._store.write(lambda connection: was_there.append(work(connection)))
        if not any(was_there):
            raise NotFound(f"there is no key {name!r}: `farm keys list` lists the existing ones")

    def orders(self, limit: int = 100, before: int | None = None) -> Sequence[LoggedOrder]:
        return self._store.read(lambda connection: audit_log.page(connection, limit, before))

    def prune_orders(self, days: float) -> int:
        days = checked(LogPruning, {"days": days}).days
        prune = partial(audit_log.prune, days=days)
        return self._store.write(logged(prune, "log prune", f"older than {days:g} days"))
