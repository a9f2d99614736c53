"""Keys and the audit log over HTTP, for administrators."""

from __future__ import annotations

from starlette.routing import Route

from farm.api.endpoints import Endpoints, ListPage, list_page, page_after
from farm.api.openapi import Described, EndpointDescription
from farm.api.schemas import AfterQuery, ApiRequest, LogQuery, OneKey
from farm.callers import ApiKey, LoggedOrder, Scope
from farm.client.remote import MadeKey
from farm.client.verb_groups import LogPruning, NewKey

ENDPOINTS: Described = {
    ("GET", "/v1/keys"): EndpointDescription(
        "List the keys, without their texts.", list[ApiKey], AfterQuery, scope=Scope.ADMIN
    ),
    ("POST", "/v1/keys"): EndpointDescription(
        "Create a key; its text is only shown once.", MadeKey, body=NewKey, scope=Scope.ADMIN
    ),
    ("POST", "/v1/keys/revoke"): EndpointDescription("Revoke a key.", dict[str, str], body=OneKey, scope=Scope.ADMIN),
    ("GET", "/v1/log"): EndpointDescription(
        "List the newest orders: who, what, when.", list[LoggedOrder], LogQuery, scope=Scope.ADMIN
    ),
    ("POST", "/v1/log/prune"): EndpointDescription("Remove old orders.", int, body=LogPruning, scope=Scope.ADMIN),
}


def routes(endpoints: Endpoints) -> list[Route]:
    """Return the routes of `/v1/keys` and `/v1/log`."""
    access = endpoints.farm.access

    def keys(request: ApiRequest) -> ListPage:
        query = request.parse_query(AfterQuery)
        return page_after(access.keys(), query.limit, query.after, lambda key: key.name)

    def add(request: ApiRequest) -> MadeKey:
        return MadeKey(access.add(request.parse_body(NewKey)))

    def revoke(request: ApiRequest) -> dict[str, str]:
        access.revoke_key(request.parse_body(OneKey).name)
        return {}

    def orders(request: ApiRequest) -> ListPage:
        query = request.parse_query(LogQuery)
        return list_page(access.orders(query.limit, query.before), query.limit, "before", lambda order: order.number)

    return [
        endpoints.get("/v1/keys", keys),
        endpoints.post("/v1/keys", add),
        endpoints.post("/v1/keys/revoke", revoke),
        endpoints.get("/v1/log", orders),
        endpoints.post("/v1/log/prune", lambda request: access.prune_orders(request.parse_body(LogPruning).days)),
    ]
