"""Keys and the audit log over HTTP, for administrators."""

from __future__ import annotations

from farm.api.endpoints import EndpointTable, ListPage, list_page, page_after
from farm.api.schemas import AfterQuery, LogQuery, OneKey
from farm.callers import ApiKey, LoggedOrder, Scope
from farm.client.local import LocalFarm
from farm.client.remote import MadeKey
from farm.client.verb_groups import LogPruning, NewKey

ENDPOINTS = EndpointTable()


@ENDPOINTS.add("GET", "/v1/keys", "List the keys, without their texts.", Scope.ADMIN)
def keys(farm: LocalFarm, query: AfterQuery) -> ListPage[ApiKey]:
    return page_after(farm.access.keys(), query.limit, query.after, lambda key: key.name)


@ENDPOINTS.add("POST", "/v1/keys", "Create a key; its text is only shown once.", Scope.ADMIN)
def add_key(farm: LocalFarm, body: NewKey) -> MadeKey:
    return MadeKey(farm.access.add(body))


@ENDPOINTS.add("POST", "/v1/keys/revoke", "Revoke a key.", Scope.ADMIN)
def revoke_key(farm: LocalFarm, body: OneKey) -> dict[str, str]:
    farm.access.revoke_key(body.name)
    return {}


@ENDPOINTS.add("GET", "/v1/log", "List the newest orders: who, what, when.", Scope.ADMIN)
def orders(farm: LocalFarm, query: LogQuery) -> ListPage[LoggedOrder]:
    newest = farm.access.orders(query.limit, query.before)
    return list_page(newest, query.limit, "before", lambda order: order.number)


@ENDPOINTS.add("POST", "/v1/log/prune", "Remove old orders.", Scope.ADMIN)
def prune_orders(farm: LocalFarm, body: LogPruning) -> int:
    return farm.access.prune_orders(body.days)
