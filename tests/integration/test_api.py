"""The farm over HTTP: the same methods with the same results and errors, whatever a client sends."""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import re
import select
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

import farm
from farm.api.endpoints import N_THREADS
from farm.cli.listening import bind
from farm.cli.main import main
from farm.client.farm import Farm
from farm.client.local import LocalFarm
from farm.client.remote import RemoteFarm
from farm.errors import FarmUnreachable, InvalidRequest, NotAllowed, StoreUnavailable
from farm.notifications import Signals
from farm.records.engine_state import StoredEngine
from farm.records.rollout import Stage, State
from farm.records.trajectory import ModelCall, Segment, VersionSpan
from farm.settings import settings
from farm.store import llm_engines, trajectories
from farm.store.database import Store
from tests.contract.store.test_store import advance, announce, claimed, finish, keep, place, run_to_end
from tests.integration.engines.test_weight_update import Workers
from tests.integration.test_bad_input import refused_requests
from tests.secret_keys import key_of
from tests.services.api import KEY, ResponseDropper, served, shown_key
from tests.services.commands import output_of
from tests.services.engines import CONTROLLED, Server, Servers
from tests.services.farms import NOOP, until
from tests.services.preloaded import completed
from tests.services.servers.postgres_cut import between
from workers.testing.serving import serving

UGLY = "\0 \ud800 \x1b[31m \ufffd \U0001f600 \u2028 </script>"
BITS = np.array([0x80000000, 1, 0x7F800000, 0x7FC12345, 0xBF9D70A4, 0x3EAAAAAB], np.uint32).view(np.float32)
"""Minus zero, the least number, infinity, a NaN with a payload, and two that decimals cannot represent."""

SHOWN = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(autouse=True)
def key() -> Iterator[None]:
    with shown_key():
        yield


@pytest.fixture
def service(store: Store) -> LocalFarm:
    return LocalFarm(store, Signals(""), 1_000_000)


@pytest.fixture
def local(service: LocalFarm) -> Farm:
    return service


@pytest.fixture
def remote(service: LocalFarm) -> Iterator[Farm]:
    with served(service) as url, farm.connect(url) as connected:
        yield connected


def segment() -> Segment:
    n = len(BITS)
    versions = np.arange(n, dtype=np.int32)
    return Segment(np.array([7, 2**31 - 1], np.int32), versions - 1, np.ones(n, np.uint8), BITS, versions, 3)


def call(index: int) -> ModelCall:
    """Return a call with arbitrary model text, and numbers that JSON libraries lose."""
    return ModelCall(
        index=index,
        messages=[{"role": "user", "content": UGLY, "n": 2**70}],
        response={"role": "assistant", "content": UGLY},
        finish_reason="stop",
        engine="e",
        started_at=1 / 3,
        latency_s=5e-324,
        n_prompt_tokens=2,
        n_response_tokens=len(BITS),
        policy_version="7",
        prompt_ids=np.array([1, 2], np.int32),
        response_ids=np.arange(len(BITS), dtype=np.int32),
        response_logprobs=BITS,
        sampling={"temperature": 0.1},
        observations=[{"role": "tool", "content": "x"}],
        tools=[{"type": "function", "function": {"name": UGLY, "parameters": {"maximum": 2**70}}}],
        versions=(VersionSpan("7", 0, 2), VersionSpan("8", 2, len(BITS))),
        stop_reason=7,
        n_cached_tokens=0,
        begins="first",
    )


@pytest.fixture
def batch_id(service: LocalFarm) -> str:
    """Complete all but one rollout, which was cancelled; the first has everything that a rollout can have."""
    store = service.store
    batch_id = service.submit({"instances": [NOOP | {"instance_id": "a"}, NOOP], "n_samples": 2})
    place(store, batch_id)
    announce(store)
    first = f"{batch_id}.0.0"
    advance(store, claimed(store, first, Stage.INIT))
    held = claimed(store, first, Stage.RUN)
    log = trajectories.CallLog(first, 1)
    for index in range(2):
        row = log.row(call(index))
        store.write(lambda connection, row=row: trajectories.record_call(connection, row))  # type: ignore[misc]
    keep(store, held, "0-a b&?.bin", bytes(range(256)))
    advance(store, held, policy_outcome="submitted", submission={"answer": "42"})
    finish(store, claimed(store, first, Stage.EVAL), 1 / 3)
    store.write(lambda connection: trajectories.store_segments(connection, first, batch_id, 1, [segment()] * 2))
    for number in ("0.1", "1.0"):
        run_to_end(store, f"{batch_id}.{number}", reward=-0.0)
    service.cancel(f"{batch_id}.1.1")
    store.write(
        lambda connection: llm_engines.add(
            connection, StoredEngine("http://e:1", "m", "secret", tool_format="hermes"), key_of(store)
        )
    )
    store.write(lambda connection: llm_engines.set_info(connection, "http://e:1/v1", CONTROLLED))
    return batch_id


_AGES = {"heartbeat_age_s", "up_s"}


def plain(value: Any) -> Any:
    """Return a form of a value that is equal only if every bit is, types included, except for ages."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if dataclasses.is_dataclass(value):
        named = {each.name: plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
        return type(value), {name: result for name, result in named.items() if name not in _AGES}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {(type(name), name): plain(each) for name, each in value.items()}
    return type(value), repr(value)


def test_remote_results_equal_local_results_exactly(local: Farm, remote: Farm, batch_id: str) -> None:
    first = f"{batch_id}.0.0"
    asks: list[Callable[[Farm], Any]] = [
        lambda client: client.status(batch_id),
        lambda client: client.wait(batch_id),
        lambda client: client.rollouts(batch_id),
        lambda client: client.collect(batch_id),
        lambda client: client.rows(batch_id),
        lambda client: client.rows(batch_id, max_staleness=0, whole_groups=True, trainable_only=False),
        lambda client: list(client.stream(batch_id)),
        lambda client: list(client.stream(batch_id, cursor=2)),
        lambda client: list(client.stream_groups(batch_id)),
        lambda client: client.rollout(first),
        lambda client: client.calls(first),
        lambda client: client.timings(first),
        lambda client: client.stage_times(batch_id),
        lambda client: client.rewards(first),
        lambda client: client.artefacts(first),
        lambda client: client.artefact(first, "0-a b&?.bin"),
        lambda client: client.conservation(batch_id),
        lambda client: client.violations(batch_id),
        lambda client: client.acknowledged(batch_id),
        lambda client: client.recent(),
        lambda client: [replace(batch, age_s=0.0) for batch in client.batches()],
        lambda client: client.nodes(),
        lambda client: client.cancel(batch_id),
    ]
    for ask in asks:
        assert plain(ask(remote)) == plain(ask(local))
    (engine_state,) = remote.engines()
    assert engine_state == replace(local.engines()[0], engine=replace(local.engines()[0].engine, key=""))
    assert len(remote.collect(batch_id)[0].segments) == 2
    assert [(each.stage, each.n) for each in remote.stage_times(batch_id)] == [("init", 3), ("run", 3), ("eval", 3)]
    assert all(0 <= each.work.p50_s <= each.work.p99_s <= each.work.max_s for each in remote.stage_times(batch_id))


def test_changes_over_http_are_stored(local: Farm, remote: Farm, batch_id: str) -> None:
    groups = list(remote.stream_groups(batch_id))
    assert remote.acknowledge(groups[0]) == groups[0].cursor == local.acknowledged(batch_id)
    assert [group.group_id for group in remote.stream_groups(batch_id)] == [groups[1].group_id]
    assert sorted(remote.rescore(f"{batch_id}.0")) == [f"{batch_id}.0.0", f"{batch_id}.0.1"]
    with pytest.raises(TimeoutError, match="2 of 4 ended"):
        remote.wait(batch_id, timeout_s=0.1)
    with pytest.raises(TimeoutError, match="nothing ended"):
        list(remote.stream(batch_id, cursor=4, timeout_s=0.1))
    assert remote.cancel(f"{batch_id}.0", [f"{batch_id}.0.1"]) == [f"{batch_id}.0.1"]
    kept = local.rollout(f"{batch_id}.0.1")
    assert (kept.state, kept.reward is None) == (State.COMPLETED, False)
    remote.add_engine("http://f:2/v1", "m", key="k")
    remote.drain_engine("http://e:1")
    engines = [state.engine for state in local.engines()]
    assert [engine.state for engine in engines] == ["draining", "active"]
    assert all(engine.key.startswith("sealed:") for engine in engines), "keys lie encrypted in the store"
    remote.remove_engine("http://e:1")
    local.orders.order_version("7", None)
    assert remote.clear_engines() == 1
    assert remote.newest_version() == "7"
    assert remote.clear_engines(forget_weights=True) == 0
    assert remote.newest_version() == local.newest_version() == ""


@pytest.mark.parametrize("store", ["sqlite_store"], indirect=True)
def test_remote_errors_equal_local_errors(local: Farm, remote: Farm, batch_id: str) -> None:
    def submit(request: Any) -> Callable[[Farm], Any]:
        return lambda client: client.submit(request)

    local.submit({"instances": [NOOP], "idempotency_key": "k"})
    asks: list[Callable[[Farm], Any]] = [
        *(submit(request) for name, (request, _) in refused_requests().items() if name not in HUGE),
        submit({"instances": [{"data_source": "chess", "fields": {}}]}),
        submit({"instances": [NOOP], "n_samples": 2, "idempotency_key": "k"}),
        submit({"instances": [NOOP] * 1000, "n_samples": 1001}),
        *(
            partial(lambda id, client: client.status(id), id)
            for id in ("", "b0", "x y", "\ud800", "../x", batch_id + ".0")
        ),
        lambda client: client.rollout("b0.0.0"),
        lambda client: client.calls(batch_id),
        lambda client: client.artefact(f"{batch_id}.0.0", "../../x"),
        lambda client: client.cancel(f"{batch_id}.7"),
        lambda client: client.cancel(batch_id, ["b0.0.0"]),
        lambda client: client.rescore("b0"),
        lambda client: client.acknowledged(batch_id, "a b"),
        lambda client: client.acknowledged("b0"),
        lambda client: client.add_engine("nothing"),
        lambda client: client.add_engine("http://u:p@h"),
        lambda client: client.add_engine("http://h", key="é"),
        lambda client: client.drain_engine("http://other"),
        lambda client: client.remove_engine("http://other"),
        lambda client: client.set_version("x" * 65),
        lambda client: client.pause_engines("later"),  # type: ignore[arg-type]
        lambda client: client.resume_engines(["http://other"]),
    ]
    for number, ask in enumerate(asks):
        with pytest.raises(farm.FarmError) as here:
            ask(local)
        with pytest.raises(farm.FarmError) as there:
            ask(remote)
        assert (type(there.value), str(there.value)) == (type(here.value), str(here.value)), number
        assert getattr(there.value, "field", "") == getattr(here.value, "field", "")


HUGE = ("a field of 100 MB", "too many instances", "what nests deep")
JSON = {"content-type": "application/json"}
RUBBISH: dict[str, tuple[str, str, dict[str, str], bytes, int, str]] = {
    "an unknown path": ("GET", "/v2/x", {}, b"", 404, "NotFound there is no /v2/x"),
    "a path of no text": ("GET", "/%ff%00", {}, b"", 404, "NotFound there is no"),
    "a path with more": ("GET", "/v1/nodes/", {}, b"", 404, "NotFound"),
    "an id of no kind": ("GET", "/v1/batches/a%20b", {}, b"", 404, "NotFound"),
    "another method": ("DELETE", "/v1/batches", {}, b"", 405, "NotAllowed not by DELETE"),
    "no JSON": ("POST", "/v1/batches", JSON, b"{", 400, "InvalidRequest is not JSON: .*body"),
    "nothing": ("POST", "/v1/batches", JSON, b"", 400, "InvalidRequest is not JSON: .*body"),
    "no UTF-8": ("POST", "/v1/batches", JSON, b'{"a": "\xff"}', 400, "InvalidRequest is not UTF-8, at byte 7 body"),
    "no object": ("POST", "/v1/batches", JSON, b"[1]", 400, "InvalidRequest .*request"),
    "no instances": ("POST", "/v1/batches", JSON, b"{}", 400, "InvalidRequest Field required instances"),
    "what nests deep": ("POST", "/v1/batches", JSON, b"[" * 10**6, 400, "InvalidRequest is not JSON: .*deeply body"),
    "a huge number": ("POST", "/v1/batches", JSON, b'{"n_samples": ' + b"9" * 9999 + b"}", 400, "InvalidRequest"),
    "no number": (
        "POST",
        "/v1/batches",
        JSON,
        json.dumps({"instances": [NOOP | {"fields": {"seconds": float("nan")}}]}).encode(),
        400,
        r"InvalidRequest seconds is nan, which is not a JSON number .*instances\[0\]\.fields",
    ),
    "a form": ("POST", "/v1/batches", {"content-type": "text/plain"}, b"{}", 415, "InvalidRequest .*json"),
    "a number for ids": ("POST", "/v1/cancel", JSON, b'{"id": 3}', 400, "InvalidRequest .*string id"),
    "an unknown field": ("POST", "/v1/cancel", JSON, b'{"id": "b", "x": 1}', 400, "InvalidRequest .* x"),
    "ids of no text": ("POST", "/v1/cancel", JSON, b'{"id": "\\ud800"}', 404, "NotFound"),
    "an unknown mode": (
        "POST",
        "/v1/engines/pause",
        JSON,
        b'{"mode": "x"}',
        400,
        "InvalidRequest 'x' must be one of .*mode",
    ),
    "a NUL": ("POST", "/v1/engines", JSON, b'{"url": "http://a\\u0000"}', 400, "InvalidRequest .*NUL .*url"),
    "a cursor of no number": ("GET", "/v1/batches/b/ended?cursor=x", {}, b"", 400, "InvalidRequest .*integer.* cursor"),
    "a huge cursor": ("GET", f"/v1/batches/b/ended?cursor={2**64}", {}, b"", 400, "InvalidRequest .* cursor"),
    "a long wait": ("GET", "/v1/batches/b/ended?wait_s=1e9", {}, b"", 400, "InvalidRequest .* wait_s"),
    "an unknown option": ("GET", "/v1/batches?x=1", {}, b"", 400, "InvalidRequest .* x"),
    "a batch that is not": ("GET", "/v1/batches/b/ended", {}, b"", 404, "NotFound there is no batch b"),
    "one that is waited for": ("GET", "/v1/batches/b/open?wait_s=9", {}, b"", 404, "NotFound there is no batch b"),
    "a name for an acknowledgement": (
        "POST",
        "/v1/batches/b/acknowledged",
        JSON,
        b'{"cursor": 1, "consumer": ""}',
        400,
        "InvalidRequest .*consumer",
    ),
}


def test_malformed_requests_get_one_clear_error_each(sqlite_store: Store, caplog: pytest.LogCaptureFixture) -> None:
    wrong = []
    with served(LocalFarm(sqlite_store, Signals(""), 1000)) as url, httpx2.Client(headers=SHOWN) as client:
        for name, (method, path, headers, body, status, wanted) in RUBBISH.items():
            answer = client.request(method, url + path, headers=headers, content=body)
            result = answer.json()["error"]
            line = f"{result['kind']} {result['message']} {result['field']}".strip()
            fits = re.match(wanted, line) and "Traceback" not in line and len(line) < 500
            if answer.status_code != status or not fits:
                wrong.append(f"{name}: {answer.status_code} {line}")
        # a body that declares to be too large is not waited for
        large = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        large.request("POST", "/v1/batches", headers={**JSON, **SHOWN, "content-length": str(10**12)})
        refused = large.getresponse()
        assert (refused.status, json.loads(refused.read())["error"]["field"]) == (413, "body")
        large.close()
        assert client.get(f"{url}/healthz").json() == {"status": "ok"}
    assert wrong == []
    assert [record for record in caplog.records if record.exc_info] == []


def test_every_request_requires_the_key(sqlite_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def connected(key: str) -> Farm:
        monkeypatch.setenv("FARM_API_KEY", key)
        settings.cache_clear()
        return farm.connect(url)

    try:
        with served(LocalFarm(sqlite_store, Signals(""), 1000), key="s3cret é") as url:
            for path in ("/", "/v1/nodes", "/nowhere"):
                assert httpx2.get(url + path).status_code == 401
            assert httpx2.get(f"{url}/healthz").status_code == 200
            assert httpx2.get(f"{url}/healthz", headers=SHOWN).status_code == 401
            right = (b"authorization", "Bearer s3cret é".encode())
            for more in (right, (b"authorization", b"Bearer x")):
                assert httpx2.get(f"{url}/v1/nodes", headers=[right, more]).status_code == 401
            for key in ("", "s3cret", "s3cret éx"):
                with pytest.raises(NotAllowed, match="FARM_API_KEY"):
                    connected(key)
            with connected("s3cret é") as client:
                assert client.recent() == []
    finally:
        monkeypatch.undo()
        settings.cache_clear()


def test_incomplete_requests_are_ended(sqlite_store: Store) -> None:
    head = f"POST /v1/cancel HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY}\r\n".encode()
    body = head + b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    whole = f"GET /healthz HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY}\r\n\r\n".encode()
    endings = {b"": b"", head: b"", head[:9]: b"", body: b"408 Request Timeout", whole + head: b"200 OK"}
    with served(LocalFarm(sqlite_store, Signals(""), 1000), request_s=0.5) as url:
        port = int(url.rpartition(":")[2])
        opened = {sent: socket.create_connection(("127.0.0.1", port), 30) for sent in endings}
        for sent, connection in opened.items():
            connection.sendall(sent)
        for sent, ends in endings.items():
            with opened[sent] as connection:
                answer = b"".join(iter(lambda c=connection: c.recv(4096), b""))  # type: ignore[misc]
                assert ends in answer.partition(b"\r\n")[0]
                assert bool(answer) == bool(ends)


def test_bytes_of_concurrent_large_requests_are_limited(sqlite_store: Store) -> None:
    head = f"POST /v1/cancel HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
    piece = b"0" * 1_000_000
    with served(LocalFarm(sqlite_store, Signals(""), 1000), max_held_bytes=3_000_000) as url, ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 30)) for _ in range(4)]
        for connection in opened:
            connection.sendall(f"{head}content-length: 2000000\r\n\r\n".encode() + piece)
        readable, _, _ = select.select(opened, [], [], 30)
        assert [b"503" in connection.recv(4096) for connection in readable] == [True]
        # the others end, and then there is room
        for connection in opened:
            connection.close()
        until(lambda: _is_taken(url, piece), "what was held is held no more")


def _is_taken(url: str, body: bytes) -> bool:
    return httpx2.post(f"{url}/v1/cancel", headers=JSON | SHOWN, content=body).status_code == 400


def test_occupied_address_is_named(sqlite_store: Store) -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            NotAllowed, match=f"cannot listen at 127.0.0.1 port {port}: Address already in use; .*--port"
        ):
            bind("127.0.0.1", port)
        output = output_of(main, "api", "--port", str(port), "--url", sqlite_store.url, code=1)
    assert f"cannot listen at 127.0.0.1 port {port}" in output


@pytest.mark.parametrize("command", ["metrics", "flower"])
def test_occupied_address_of_metrics_and_flower_is_named(command: str, sqlite_store: Store, tmp_path: Path) -> None:
    env = {"FARM_STORE_URL": sqlite_store.url, "FARM_BROKER_URL": "redis://127.0.0.1:9/0", "FARM_HOME": str(tmp_path)}
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        # in a separate process, which may become Flower
        done = completed("farm.cli.main", [command, "--port", str(port)], os.environ | env)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert f"cannot listen at 127.0.0.1 port {port}: Address already in use" in line


def test_long_polls_occupy_no_thread(sqlite_store: Store) -> None:
    service = LocalFarm(sqlite_store, Signals(""), 1000)
    n = 3 * N_THREADS
    with served(service) as url, farm.connect(url) as client, ThreadPoolExecutor(n) as trainers:
        batch_id = client.submit({"instances": [NOOP]})
        begun = threading.Barrier(n + 1)

        def follow() -> list[str]:
            with httpx2.Client(base_url=url, timeout=600, headers=SHOWN) as trainer:
                assert trainer.get("/healthz").is_success
                begun.wait(600)
                page = trainer.get(f"/v1/batches/{batch_id}/ended?wait_s=20").json()
            return [rollout["rollout_id"] for rollout in page["rollouts"]]

        waiting = [trainers.submit(follow) for _ in range(n)]
        begun.wait(600)
        for _ in range(3):
            assert client.status(batch_id).n_finished == 0
        assert not any(each.done() for each in waiting), "the others need not wait until these have waited"
        place(sqlite_store, batch_id)
        run_to_end(sqlite_store, f"{batch_id}.0.0")
        assert [each.result(600) for each in waiting] == [[f"{batch_id}.0.0"]] * n


def test_lost_response_repeats_no_change(sqlite_store: Store) -> None:
    service = LocalFarm(sqlite_store, Signals(""), 1000)
    kept: list[ResponseDropper] = []

    def around(app: Any) -> ResponseDropper:
        kept.append(ResponseDropper(app))
        return kept[0]

    with served(service, around=around) as url, farm.connect(url) as client:
        (api,) = kept
        api.n = 2
        batch_id = client.submit({"instances": [NOOP] * 2})
        assert (api.n, client.recent()) == (0, [batch_id])
        assert client.submit({"instances": [NOOP] * 2}) != batch_id, "the same again is another"
        place(sqlite_store, batch_id)
        run_to_end(sqlite_store, f"{batch_id}.0.0")
        [ended] = service.page(batch_id, 0).rollouts
        api.n = 1
        assert client.acknowledge(ended) == ended.cursor
        api.n = 1
        assert client.cancel(f"{batch_id}.1") == []
        assert client.rollout(f"{batch_id}.1.0").state is State.CANCELLED
        api.n = 1
        with pytest.raises(FarmUnreachable, match="may have been executed"):
            client.rescore(f"{batch_id}.0.0")
        assert client.rollout(f"{batch_id}.0.0").state is State.QUEUED


def test_server_that_is_no_farm_api_is_reported(sqlite_store: Store) -> None:
    (port,) = (listener.getsockname()[1] for listener in [bind("127.0.0.1", 0)])
    with pytest.raises(FarmUnreachable, match="no API of a farm answers"):
        RemoteFarm(f"http://127.0.0.1:{port}", patience_s=0.2).check()
    for url in ("http://", "http://[", "http://h:x", "http://h:99999", "http://h/?a=b", "http://u:p@h"):
        with pytest.raises(InvalidRequest):
            RemoteFarm(url)
    without = LocalFarm(Store("postgresql://nobody@127.0.0.1:1/none", patience_s=0.1), Signals(""), 1000)
    with served(without) as url:
        assert httpx2.get(f"{url}/readyz").status_code == 503
        assert httpx2.get(f"{url}/healthz").status_code == 200
        with pytest.raises(StoreUnavailable, match="the database does not answer"):
            RemoteFarm(url, KEY, patience_s=0.2).status("b0")
    page = Route("/ok/v1/batches", lambda request: Response("<html>"))
    away = Route("/away/v1/batches", lambda request: Response("<html>", 503))
    with serving(Starlette(routes=[page, away])) as url:
        for path in ("", "/ok", "/away"):
            with pytest.raises(FarmUnreachable, match="is not a farm's API"):
                RemoteFarm(url + path, patience_s=0.2).check()
    without.close()


def test_weights_are_updated_over_http(sqlite_store: Store, broker_url: str) -> None:
    server = Server("told", info=CONTROLLED)
    service = LocalFarm(sqlite_store, Signals(broker_url), 1000)
    with served(service) as url, farm.connect(url) as client:
        client.add_engine(server.url)
        workers = Workers(sqlite_store, broker_url, Servers(server))
        try:
            until(lambda: client.engines()[0].engine.info is not None, "the engine is found out")
            with client.weight_update(7) as stored_engines:
                assert [engine.url for engine in stored_engines] == [server.url]
                assert server.paused
                assert client.engines()[0].engine.paused == "drain"
        finally:
            workers.close()
    assert server.received == ["pause drain", "version 7", "resume"]
    service.signals.close()


def test_clients_may_use_any_of_several_apis(store: Store, batch_id: str) -> None:
    """All APIs of a store share its state: each client receives the remaining rollouts."""
    with ExitStack() as stack:
        urls = [stack.enter_context(served(LocalFarm(store, Signals(""), 1_000_000))) for _ in range(3)]
        one, two, three = (stack.enter_context(farm.connect(url)) for url in urls)
        first, *rest = one.stream(batch_id, cursor=0, timeout_s=30)
        assert rest, "there is something to be left"
        two.acknowledge(first)
        assert [each.rollout_id for each in three.stream(batch_id, timeout_s=30)] == [each.rollout_id for each in rest]
        request = {"instances": [NOOP], "idempotency_key": "once"}
        with ThreadPoolExecutor(3) as pool:
            ids = list(pool.map(lambda client: client.submit(request), (one, two, three)))
        assert len(set(ids)) == 1


def test_request_waits_for_the_database_behind_an_api(postgres_store: Store) -> None:
    with between(postgres_store.url) as line:
        store = Store(line.url, patience_s=0.2)
        with served(LocalFarm(store, Signals(""), 1_000_000)) as url, farm.connect(url) as client:
            line.away()
            assert httpx2.get(f"{url}/readyz").status_code == 503
            with ThreadPoolExecutor(1) as pool:
                submitted = pool.submit(client.submit, {"instances": [NOOP]})
                until(
                    lambda: httpx2.get(f"{url}/v1/batches", headers=SHOWN).status_code == 503,
                    "it says that it cannot answer",
                )
                assert not submitted.done()
                line.back()
                assert [submitted.result(30)] == client.recent()
        store.close()
