"""Sign-in to the page: who sees it, who may give orders there, and what no key allows."""

from __future__ import annotations

import socket

import httpx2
import pytest

from farm.client.local import LocalFarm
from farm.records.node import DRAINING, Node
from farm.store import nodes
from farm.web.app import application
from tests.integration.web.hostile_pages import VIEWS
from tests.services.api import KEY, served
from tests.services.farms import until


def test_page_requires_a_valid_key(farm: LocalFarm, batch_id: str) -> None:
    with served(farm, page=application) as url, httpx2.Client(base_url=f"{url}/web") as client:
        for view in (*VIEWS, "/batches/{b}/live", "/batches/{b}/rollouts.jsonl", "/rollouts/{b}.0.0/trace.json"):
            answer = client.get(view.format(b=batch_id), headers={"accept": "text/html"})
            assert (answer.status_code, batch_id in answer.text) == (303, False), view
            assert answer.headers["location"].startswith("/web/sign-in?then=%2F")
            assert client.get(view.format(b=batch_id), headers={"accept": "*/*"}).status_code == 401
        assert client.post("/orders/cancel", data={"id": batch_id}).status_code in (303, 401)
        assert not farm.status(batch_id).n_cancelled
        for key in ("", "wrong", KEY + "x", "\u00e9"):
            answer = client.post("/sign-in", data={"key": key})
            assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)
        for cookie in (
            f"farm_key={KEY}x",
            "farm_key",
            "farm_key=",
            f"other={KEY}",
            "farm_key=%ff;;=",
            f'farm_key="{KEY}',
        ):
            assert client.get("/cluster", headers={"cookie": cookie, "accept": "*/*"}).status_code == 401
        big = client.post("/sign-in", data={"key": KEY, "then": "/" + "x" * 10_000})
        assert big.status_code == 401
        assert client.get("/static/page.css").status_code == 200
        assert client.get("/static/none.css").status_code == 404
        assert client.get("/static/%2e%2e/app.py").status_code == 404


def test_incomplete_forms_time_out_without_errors(farm: LocalFarm, caplog: pytest.LogCaptureFixture) -> None:
    with served(farm, page=application, request_s=0.3) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        for path in ("sign-in", "orders/cancel"):
            head = f"POST /web/{path} HTTP/1.1\r\nHost: x\r\nCookie: farm_key={KEY}\r\nContent-Length: 100\r\n\r\nkey="
            with socket.create_connection((host, int(port)), 60) as slow:
                slow.sendall(head.encode())
                assert slow.recv(100).startswith(b"HTTP/1.1 408")
            with socket.create_connection((host, int(port)), 60) as gone:
                gone.sendall(head.encode())
        assert httpx2.get(f"{url}/web/sign-in").status_code == 200
    assert not [each for each in caplog.records if each.exc_info]


def test_sign_in_redirects_only_within_the_page(farm: LocalFarm) -> None:
    with served(farm, page=application) as url, httpx2.Client(base_url=url) as client:
        assert client.get("/", headers={"accept": "text/html"}).headers["location"] == "/web/"
        for then, place in (
            ("/cluster", "/web/cluster"),
            ("//evil", "/web/"),
            ("/\\evil", "/web/"),
            ("http://e", "/web/"),
        ):
            answer = client.post("/web/sign-in", data={"key": KEY, "then": then})
            assert answer.headers["location"] == place
        cookie = answer.headers["set-cookie"]
        assert {"HttpOnly", "Path=/web", "SameSite=strict"} <= {part.strip() for part in cookie.split(";")}
        answer = client.post("/web/sign-out")
        assert client.get("/web/cluster", headers={"accept": "*/*"}).status_code == 401
    # without the page, the API is unchanged
    with served(farm) as url:
        assert httpx2.get(f"{url}/web/").status_code == 401


def test_orders_are_accepted_only_from_pages_of_the_farm(
    browser: httpx2.Client, farm: LocalFarm, batch_id: str
) -> None:
    order = {"id": f"{batch_id}.1", "back": f"/batches/{batch_id}"}
    for elsewhere in (
        {"origin": "http://evil"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "null"},
    ):
        assert browser.post("/orders/cancel", data=order, headers=elsewhere).status_code == 403
    assert farm.status(batch_id).n_cancelled == 0
    answer = browser.post("/orders/cancel", data=order, headers={"sec-fetch-site": "same-origin"})
    assert (answer.status_code, answer.headers["location"]) == (303, f"/web/batches/{batch_id}")
    assert farm.status(batch_id).n_cancelled == 2
    assert browser.post("/orders/cancel", data={"id": batch_id, "back": "//evil"}).headers["location"] == "/web/"
    assert farm.status(batch_id).done
    assert browser.post("/orders/cancel", data={"id": "nothing"}).status_code == 404
    assert browser.post("/orders/cancel", data={}).status_code == 400
    assert browser.post("/orders/destroy", data={"id": batch_id}).status_code == 404
    assert browser.post("/orders/drain-engine", data={"id": "http://none/v1"}).status_code == 404
    assert browser.post("/orders/drain-node", data={"id": "none"}).status_code == 404
    farm.store.write(lambda connection: nodes.announce(connection, Node("n1", 1, 1, 1, 1, [], {})))
    assert "Drain node n1?" in browser.get("/cluster").text
    browser.post("/orders/drain-node", data={"id": "n1"})
    assert [each.state for each in farm.nodes()] == [DRAINING]
    assert "Drain node n1?" not in browser.get("/cluster").text
    farm.add_engine("http://127.0.0.1:9/v1", "m")
    browser.post("/orders/pause-engine", data={"id": "http://127.0.0.1:9/v1"})
    assert [each.engine.paused for each in farm.engines()] == ["drain"]
    browser.post("/orders/resume-engine", data={"id": "http://127.0.0.1:9/v1"})
    assert [each.engine.paused for each in farm.engines()] == [""]


def test_named_keys_see_the_page_and_give_only_orders_of_their_scopes(farm: LocalFarm, batch_id: str) -> None:
    keys = {
        name: farm.access.add_key(name, scopes) for name, scopes in (("reader", ["read"]), ("operator", ["operate"]))
    }
    farm.add_engine("http://127.0.0.1:9/v1", "m")
    drain, cancel = {"id": "http://127.0.0.1:9/v1"}, {"id": f"{batch_id}.1.0"}
    with served(farm, page=application) as url, httpx2.Client(base_url=f"{url}/web") as client:
        assert client.post("/sign-in", data={"key": keys["reader"]}).status_code == 303
        assert batch_id in client.get("/").text
        refused = [client.post("/orders/cancel", data=cancel), client.post("/orders/drain-engine", data=drain)]
        assert [answer.status_code for answer in refused] == [403, 403]
        assert "needs operate" in refused[1].text
        assert not farm.status(batch_id).n_cancelled
        farm.access.revoke_key("reader")
        until(lambda: client.get("/", headers={"accept": "*/*"}).status_code == 401, "the revoked key sees nothing")
        assert client.post("/sign-in", data={"key": keys["operator"]}).status_code == 303
        assert client.post("/orders/cancel", data=cancel).status_code == 303
        assert client.post("/orders/drain-engine", data=drain).status_code == 303
    assert farm.status(batch_id).n_cancelled == 1
    assert {("operator", "cancel")} <= {(each.by, each.verb) for each in farm.access.orders()}


def test_request_is_shown_without_its_secrets(browser: httpx2.Client, farm: LocalFarm) -> None:
    instance = {
        "data_source": "noop",
        "fields": {},
        "engine_url": "http://127.0.0.1:9/v1",
        "engine_key": "k-of-instance",
    }
    roles = {"judge": {"engine_url": "http://127.0.0.1:8/v1", "engine_key": "k-of-judge"}}
    request = {"instances": [instance], "secrets": {"TOKEN": "k-of-secrets"}, "roles": roles}
    batch_id = farm.submit(request)
    shown = browser.get(f"/batches/{batch_id}").text
    assert "TOKEN" in shown
    assert shown.count("(secret)") >= 2
    assert "k-of" not in shown
    assert "sealed:" not in shown
    assert farm.batches()[0].submitter in browser.get("/").text
