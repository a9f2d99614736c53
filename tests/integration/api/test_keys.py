"""Named keys of the API: each is limited to its scopes and quotas, ends when it is revoked, and is logged with its
orders.
"""

from __future__ import annotations

import asyncio
import getpass
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import text
from starlette.responses import Response
from starlette.routing import Mount, Route

import farm
from farm.api.app import ENDPOINTS
from farm.api.auth import guarded
from farm.api.endpoints import ApiConfig, Endpoints, refusal
from farm.api.protocols import PROTOCOLS, WireProtocol, application
from farm.callers import Scope, current_caller
from farm.cli.main import main
from farm.client.farm import Farm
from farm.client.local import LocalFarm
from farm.client.remote import RemoteFarm
from farm.errors import Conflict, Forbidden, InvalidRequest, NotAllowed, NotFound, Overloaded
from farm.notifications import Signals
from farm.plugins import installed, load
from farm.records.lending.borrowed_sandbox import BorrowRequest
from farm.settings import settings
from farm.store.database import Store
from tests.services import commands
from tests.services.api import KEY, served, shown_key
from tests.services.farms import NOOP, until

ENGINE = "http://127.0.0.1:9/v1"


@dataclass
class _Api:
    """An API on a store, and clients of it by key."""

    url: str
    service: LocalFarm
    admin: Farm
    http: httpx2.Client

    def key(self, name: str, *scopes: str, **quotas: Any) -> str:
        return self.admin.access.add_key(name, scopes, **quotas)

    def client(self, key: str) -> RemoteFarm:
        return RemoteFarm(self.url, key, 5.0)

    def status(self, key: str, method: str, path: str) -> int:
        body: dict[str, Any] = {"json": {}} if method == "POST" else {}
        return self.http.request(method, self.url + path, headers={"x-api-key": key}, **body).status_code


BEGIN = ("/process", "/e2b/sandboxes", "/e2b/v2/sandboxes")
"""The path suffixes where a rollout or a sandbox is started, and awaited."""


@pytest.fixture
def api(sqlite_store: Store) -> Iterator[_Api]:
    service = LocalFarm(sqlite_store, Signals(""), 1_000_000)
    with (
        shown_key(),
        served(service, speak=tuple(installed(PROTOCOLS))) as url,
        farm.connect(url) as admin,
        httpx2.Client() as http,
    ):
        yield _Api(url, service, admin, http)


def test_every_route_accepts_only_keys_with_its_scope(api: _Api) -> None:
    keys = {scope: api.key(f"of-{scope.value}", scope.value) for scope in Scope}
    wrong = []
    routes: dict[str, Any] = {f"{method} {path}": described.scope for (method, path), described in ENDPOINTS.items()}
    for name in installed(PROTOCOLS):
        protocol: WireProtocol = load(PROTOCOLS, name)
        routes |= {f"{method} /{name}{path}": scope for (method, path), scope in protocol.scopes.items()}
    for route, scopes in routes.items():
        needed = scopes if scopes is None or isinstance(scopes, tuple) else (scopes,)
        method, path = route.replace("{", "").replace("}", "").split()
        for scope, key in keys.items():
            allowed = needed in (None, (Scope.READ,)) or scope is Scope.ADMIN or scope in (needed or ())
            # an executed order would change the later answers, or wait for a node
            is_begun = allowed and method == "POST" and path.endswith(BEGIN)
            status = 0 if is_begun else api.status(key, method, path)
            if (status == 403) == allowed or status in (401, 500):
                wrong.append(f"{route}, with {scope.value}: {status}")
    assert wrong == []


def test_route_without_a_scope_is_an_error_at_start(sqlite_store: Store) -> None:
    async def nothing(request: Any) -> Response:
        return Response()

    for route, scopes in [
        (Route("/a", nothing), {}),
        (Route("/a", nothing, methods=["POST"]), {("GET", "/a"): Scope.READ}),
        (Mount("/a", routes=[]), {("GET", "/a"): Scope.READ}),
    ]:
        with pytest.raises(LookupError, match="scope"):
            guarded([route], scopes, refusal)
    endpoints = Endpoints(LocalFarm(sqlite_store, Signals(""), 1), ApiConfig.of(settings()))
    unknown = WireProtocol(lambda endpoints: [endpoints.get("/new", lambda request: 1)], refusal, {})
    with pytest.raises(LookupError, match="GET /new has no scope"):
        application(endpoints, unknown)


def test_route_without_key_middleware_is_refused(sqlite_store: Store) -> None:
    scopes = {("GET", "/new"): Scope.READ}
    known = WireProtocol(lambda endpoints: [endpoints.get("/new", lambda request: 1)], refusal, scopes)
    bare = application(Endpoints(LocalFarm(sqlite_store, Signals(""), 1), ApiConfig.of(settings())), known)

    async def ask() -> int:
        async with httpx2.AsyncClient(transport=httpx2.ASGITransport(bare), base_url="http://api") as client:
            return (await client.get("/new")).status_code

    assert asyncio.run(ask()) == 403


def test_key_is_stored_as_a_hash_and_shown_once(api: _Api, sqlite_store: Store) -> None:
    key = api.key("trainer", "submit", "operate", max_open=7)
    [kept] = api.admin.access.keys()
    assert (kept.name, kept.scopes, kept.max_open) == ("trainer", (Scope.SUBMIT, Scope.OPERATE), 7)
    for table in ("api_keys", "audit_log"):
        query = text(f"SELECT * FROM {table}")
        rows = sqlite_store.read(lambda connection, query=query: connection.execute(query).all())  # type: ignore[misc]
        assert rows
        assert key not in str(rows)
    assert key not in str(httpx2.get(f"{api.url}/v1/keys", headers={"x-api-key": KEY}).json())


@pytest.mark.parametrize(
    ("name", "scopes", "quotas", "field"),
    [
        ("", ["read"], {}, "name"),
        ("a b", ["read"], {}, "name"),
        ("a\n", ["read"], {}, "name"),
        ("x" * 65, ["read"], {}, "name"),
        ("admin", ["read"], {}, "name"),
        ("a", [], {}, "scopes"),
        ("a", ["write"], {}, "scopes[0]"),
        ("a", ["read"], {"max_open": -1}, "max_open"),
        ("a", ["read"], {"max_engines": 2**31}, "max_engines"),
        ("a", ["read"], {"max_rate": 0}, "max_rate"),
        ("a", ["read"], {"max_rate": float("nan")}, "max_rate"),
    ],
)
def test_invalid_key_options_are_refused_by_field(
    api: _Api, name: str, scopes: list[str], quotas: dict[str, Any], field: str
) -> None:
    for connected in (api.service, api.admin):
        with pytest.raises(InvalidRequest) as refused:
            connected.access.add_key(name, scopes, **quotas)
        assert refused.value.field == field
    assert api.admin.access.keys() == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_invalid_numbers_delete_no_log_entries_and_renew_no_lease(api: _Api, value: float) -> None:
    lent = api.service.sandboxes.begin(BorrowRequest())
    for connected in (api.service, api.admin):
        before = len(connected.access.orders())
        with pytest.raises(InvalidRequest):
            connected.access.prune_orders(value)
        with pytest.raises(InvalidRequest):
            connected.sandboxes.renew(lent.sandbox_id, value)
        assert len(connected.access.orders()) == before > 0
    assert api.service.sandboxes.get(lent.sandbox_id).lease_s == lent.lease_s


def test_concurrent_requests_create_one_key_per_name(api: _Api) -> None:
    def made(n: int) -> str | None:
        try:
            return api.key("one", "read")
        except Conflict:
            return None

    with ThreadPoolExecutor(8) as threads:
        keys = [key for key in threads.map(made, range(8)) if key]
    assert len(keys) == 1
    assert api.status(keys[0], "GET", "/v1/nodes") == 200


def test_quota_of_open_rollouts_is_per_key_and_holds_under_concurrency(api: _Api) -> None:
    small, large = api.client(api.key("small", "submit", max_open=3)), api.client(api.key("large", "submit"))
    with small, large:
        large.submit({"instances": [NOOP], "n_samples": 50})
        batch_id = small.submit({"instances": [NOOP], "n_samples": 3})
        with pytest.raises(Overloaded, match="small"):
            small.submit({"instances": [NOOP]})
        with pytest.raises(InvalidRequest, match="exceed the limit of key 'small', 3"):
            small.submit({"instances": [NOOP], "n_samples": 4})
        small.cancel(batch_id)

        def one(n: int) -> bool:
            try:
                return bool(small.submit({"instances": [NOOP]}))
            except Overloaded:
                return False

        with ThreadPoolExecutor(8) as threads:
            assert sum(threads.map(one, range(12))) == 3


def test_key_of_a_trainer_changes_only_engines_of_its_own_runs(api: _Api) -> None:
    own, other, shared = (f"http://127.0.0.1:{port}/v1" for port in (1, 2, 3))
    with api.client(api.key("trainer", "submit", max_engines=2)) as one, api.client(api.key("b", "submit")) as two:
        api.admin.add_engine(shared, "m")
        for url, model in ((own, ""), (own, "m"), (shared, "run:a"), (shared, "m")):
            with pytest.raises(Forbidden, match="needs operate"):
                one.add_engine(url, model)
        one.add_engine(own, "run:a")
        one.add_engine(own, "run:a", tokenizer="t")
        with pytest.raises(Forbidden, match=r"env:SECRET: reading variables of nodes needs scope operate"):
            one.add_engine(other, "run:a", key="env:SECRET")
        with pytest.raises(Forbidden, match="needs operate"):
            one.add_engine(own, "m")
        two.add_engine(other, "run:b")
        for verb in (partial(two.add_engine, own, "run:b"), partial(two.remove_engine, own)):
            with pytest.raises(Forbidden, match=r"of run:a was added by trainer"):
                verb()
        orders: tuple[Callable[[], Any], ...] = (
            partial(one.remove_engine, shared),
            partial(one.drain_engine, own),
            one.clear_engines,
            partial(one.drain_node, "n1"),
        )
        for order in orders:
            with pytest.raises(Forbidden, match="needs operate"):
                order()
        one.add_engine("http://127.0.0.1:4/v1", "run:c")
        with pytest.raises(Forbidden, match="2 engines"):
            one.add_engine("http://127.0.0.1:5/v1", "run:d")
        one.remove_engine(own)
        with pytest.raises(NotFound):
            one.remove_engine(own)
    api.admin.remove_engine(other)
    assert sorted(state.engine.model for state in api.admin.engines()) == ["m", "run:c"]


def test_quota_of_engines_counts_only_engines_of_the_key(api: _Api) -> None:
    with api.client(api.key("two", "operate", max_engines=2)) as client:
        api.admin.add_engine(ENGINE)
        for port in (1, 2, 1):
            client.add_engine(f"http://127.0.0.1:{port}/v1")
        with pytest.raises(Forbidden, match="2 engines"):
            client.add_engine("http://127.0.0.1:3/v1")
        client.remove_engine("http://127.0.0.1:1/v1")
        client.add_engine("http://127.0.0.1:3/v1")
    assert len(api.admin.engines()) == 3


def test_requests_over_the_rate_limit_get_429_without_affecting_others(api: _Api) -> None:
    slow = api.key("slow", "read", max_rate=0.001)
    statuses = [api.status(slow, "GET", "/v1/nodes") for _ in range(3)]
    assert statuses == [200, 429, 429]
    answer = httpx2.get(f"{api.url}/prorl/status", headers={"x-api-key": slow})
    assert (answer.status_code, list(answer.json())) == (429, ["detail"])
    assert int(answer.headers["retry-after"]) >= 1
    assert api.status(KEY, "GET", "/v1/nodes") == 200
    # a client waits for its turn
    with api.client(api.key("often", "read", max_rate=20)) as client:
        assert [len(client.nodes()) for _ in range(30)] == [0] * 30


def test_revoked_key_is_refused_by_every_api_and_ends_long_polls(api: _Api) -> None:
    with served(LocalFarm(api.service.store, Signals(""), 1000)) as other:
        key = api.key("gone", "submit")
        with api.client(key) as client:
            batch_id = client.submit({"instances": [NOOP]})
        assert httpx2.get(f"{other}/v1/nodes", headers={"x-api-key": key}).status_code == 200
        waiting: list[int] = []
        path = f"/v1/batches/{batch_id}/open?wait_s=20"
        thread = threading.Thread(target=lambda: waiting.append(api.status(key, "GET", path)))
        thread.start()
        api.admin.access.revoke_key("gone")
        until(lambda: api.status(key, "GET", "/v1/nodes") == 401, "the API refuses it")
        until(lambda: httpx2.get(f"{other}/", headers={"x-api-key": key}).status_code == 401, "the other, too")
        thread.join(10)
        # it was answered long before its time limit, without the awaited result
        assert waiting == [403]
    with pytest.raises(NotFound):
        api.admin.access.revoke_key("gone")
    again = api.key("gone", "read")
    assert [api.status(each, "GET", "/v1/nodes") for each in (again, key)] == [200, 401]


def test_submitter_changes_its_own_batches_and_operator_changes_all(api: _Api) -> None:
    one, two, operator = (api.client(api.key(*each)) for each in (("a", "submit"), ("b", "submit"), ("o", "operate")))
    with one, two, operator:
        batch_id = one.submit({"instances": [NOOP], "n_samples": 2})
        for change in (
            lambda: two.cancel(batch_id),
            lambda: two.rescore(f"{batch_id}.0.0"),
            lambda: two.acknowledge_up_to(batch_id, 0, "c"),
            lambda: operator.submit({"instances": [NOOP]}),
        ):
            with pytest.raises(Forbidden):
                change()
        with pytest.raises(NotFound):
            two.cancel("b0000000000")
        assert two.status(batch_id).submitter == "a"
        assert len(one.cancel(f"{batch_id}.0.0")) == 1
        assert len(operator.cancel(batch_id)) == 1


def test_every_order_is_logged_with_its_caller(api: _Api) -> None:
    with api.client(api.key("ops", "submit", "operate")) as ops:
        batch_id = ops.submit({"instances": [NOOP], "idempotency_key": "k"})
        assert ops.submit({"instances": [NOOP], "idempotency_key": "k"}) == batch_id
        ops.cancel(batch_id)
        ops.cancel(batch_id)
        ops.add_engine(ENGINE)
        ops.orders.order_pause("drain", "me", None)
        ops.orders.order_version("7", None)
        ops.drain_engine(ENGINE)
        ops.remove_engine(ENGINE)
        ops.clear_engines()
        with pytest.raises(Forbidden):
            ops.access.orders()
    api.service.cancel(api.service.submit({"instances": [NOOP]}))
    api.admin.access.revoke_key("ops")
    orders = [(order.by, order.verb, order.target) for order in reversed(api.admin.access.orders())]
    mine = [(verb, target) for by, verb, target in orders if by == "ops"]
    assert mine == [
        ("submit", batch_id),
        ("cancel", batch_id),
        ("engines add", ENGINE),
        ("engines pause", "all"),
        ("engines version", "all"),
        ("engines drain", ENGINE),
        ("engines remove", ENGINE),
        ("engines clear", "all"),
    ]
    assert orders[0] == ("admin", "keys add", "ops")
    assert orders[-1] == ("admin", "keys revoke", "ops")
    assert [verb for by, verb, _ in orders if by == getpass.getuser()] == ["submit", "cancel"]
    numbers = [order.number for order in api.admin.access.orders(limit=3)]
    assert [order.number for order in api.admin.access.orders(limit=2, before=numbers[0])] == numbers[1:]
    assert api.admin.access.prune_orders(1) == 0
    assert api.admin.access.prune_orders(0) == len(orders) + 1


def test_protocol_requests_use_the_quota_and_scope_of_their_key(api: _Api) -> None:
    key = {"x-api-key": api.key("verl", "submit", max_open=0)}
    assert httpx2.post(f"{api.url}/prorl/start", headers=key).status_code == 200
    httpx2.post(f"{api.url}/prorl/add_llm_server", json={"address": ENGINE}, headers=key)
    body = {"instance": {"data_source": "deepscaler", "prompt": "1+1", "ground_truth": "2"}, "sampling_params": {}}
    answer = httpx2.post(f"{api.url}/prorl/process", json=body, headers=key)
    assert answer.status_code in (422, 503), answer.text
    read = {"x-api-key": api.key("onlooker", "read")}
    assert httpx2.post(f"{api.url}/prorl/cancel", json={"job_id": "x"}, headers=read).status_code == 403


def test_commands_create_list_and_revoke_keys(api: _Api, sqlite_store: Store) -> None:
    def output_of(*words: str, code: int = 0) -> str:
        return commands.output_of(main, *words, "--url", api.url, code=code)

    key = output_of("keys", "add", "cli", "--scope", "read", "--scope", "submit", "--max-rate", "100").strip()
    assert api.status(key, "GET", "/v1/nodes") == 200
    assert "key 'cli' already exists" in output_of("keys", "add", "cli", code=1)
    with api.client(key) as client:
        client.submit({"instances": [NOOP]})
    assert "cli" in output_of("ls")
    assert "read submit" in output_of("keys", "list")
    assert key not in output_of("keys", "list") + output_of("log")
    assert "keys add  cli" in output_of("log", "-n", "5")
    assert "revoked" in output_of("keys", "revoke", "cli")
    assert "there is no key 'cli'" in output_of("keys", "revoke", "cli", code=1)


def test_local_caller_is_the_operating_system_user() -> None:
    assert (current_caller().name, current_caller().may(Scope.ADMIN)) == (getpass.getuser(), True)


def test_key_during_database_outage_gets_503_and_not_401(tmp_path: Path, api: _Api) -> None:
    key = api.key("named", "read")

    def away(*args: Any, **kwargs: Any) -> Any:
        from farm.errors import StoreUnavailable

        raise StoreUnavailable("the database does not answer")

    read: Callable[..., Any] = api.service.store.read
    api.service.store.read = away  # type: ignore[method-assign]
    try:
        assert api.status(key, "GET", "/v1/nodes") == 503
    finally:
        api.service.store.read = read  # type: ignore[method-assign]
    assert api.status(key, "GET", "/v1/nodes") == 200
    with pytest.raises(NotAllowed), api.client("of-nobody") as stranger:
        stranger.nodes()
