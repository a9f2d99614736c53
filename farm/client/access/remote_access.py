"""API keys and the audit log, through the API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farm.callers import ApiKey, LoggedOrder
from farm.client.access.access_control import AccessControl, NewKey
from farm.client.http_connection import ApiConnection


@dataclass(frozen=True, slots=True)
class MadeKey:
    """The response to a new key: its text, which is shown only once."""

    key: str


class RemoteAccess(AccessControl):
    """The verbs as requests to the API."""

    def __init__(self, api: ApiConnection) -> None:
        self._api = api

    def add(self, new: NewKey) -> str:
        # not repeatable: a key whose text was lost on the way has to be revoked
        return self._api.post(MadeKey, "/v1/keys", new.model_dump(mode="json"), repeatable=False).key

    def keys(self) -> Sequence[ApiKey]:
        return self._api.pages(ApiKey, "/v1/keys", lambda key: key.name)

    def revoke_key(self, name: str) -> None:
        self._api.post(dict, "/v1/keys/revoke", {"name": name}, repeatable=False)

    def orders(self, limit: int = 100, before: int | None = None) -> Sequence[LoggedOrder]:
        older = {} if before is None else {"before": before}
        return self._api.get(list[LoggedOrder], "/v1/log", limit=limit, **older)

    def prune_orders(self, days: float) -> int:
        return self._api.post(int, "/v1/log/prune", {"days": days})
