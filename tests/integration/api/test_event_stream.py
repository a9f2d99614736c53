"""A batch as server-sent events resumes after a broken connection; lists of the API come in pages."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from typing import Any

import httpx2
import pytest

import farm
from farm.client import serialization
from farm.client.farm import Farm
from farm.client.local import LocalFarm
from farm.errors import StoreUnavailable
from farm.notifications import Signals
from farm.records.lending.borrowed_sandbox import BorrowRequest
from farm.records.node import Node
from farm.records.rollout import Rollout
from farm.store import nodes
from farm.store.database import Store
from tests.contract.store.test_store import announce, place, run_to_end
from tests.services.api import KEY, served, shown_key
from tests.services.farms import NOOP, until

SHOWN = {"x-api-key": KEY}
Event = tuple[str, int, Any]


@pytest.fixture(autouse=True)
def key() -> Iterator[None]:
    with shown_key():
        yield


@pytest.fixture
def service(sqlite_store: Store) -> LocalFarm:
    return LocalFarm(sqlite_store, Signals(""), 100_000)


def placed_rollouts(service: LocalFarm, n_instances: int, n_samples: int) -> list[str]:
    """Return the rollouts of a placed batch."""
    instances = [NOOP | {"instance_id": f"i{n}"} for n in range(n_instances)]
    batch_id = service.submit({"instances": instances, "n_samples": n_samples})
    place(service.store, batch_id)
    announce(service.store)
    return [rollout.rollout_id for rollout in service.rollouts(batch_id)]


def events(client: httpx2.Client, path: str, last: int | None = None) -> Generator[Event, None, None]:
    """Yield the (kind, id, data) of each event until the stream ends."""
    headers = SHOWN if last is None else SHOWN | {"last-event-id": str(last)}
    with client.stream("GET", path, headers=headers, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        fields: dict[str, str] = {}
        for line in answer.iter_lines():
            if line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                fields[name] = value
            elif "event" in fields:
                yield fields["event"], int(fields["id"]), json.loads(fields["data"])
                fields = {}


def ids(found: list[Event]) -> list[str]:
    return [data["rollout_id"] for kind, _, data in found if kind == "rollout"]


def test_events_resume_at_another_api_and_equal_the_stream(service: LocalFarm) -> None:
    wanted = placed_rollouts(service, 2, 3)
    batch_id = wanted[0].partition(".")[0]
    path = f"/v1/batches/{batch_id}/events"
    with served(service) as one, served(LocalFarm(service.store, Signals(""), 10)) as two, httpx2.Client() as client:
        stream = events(client, one + path)
        run_to_end(service.store, wanted[0], reward=0.5)
        first = next(stream)
        stream.close()
        for rollout_id in wanted[1:]:
            run_to_end(service.store, rollout_id, reward=1.0)
        rest = list(events(client, two + path, first[1]))
        assert [*ids([first]), *ids(rest)] == wanted
        assert [kind for kind, _, _ in rest] == ["rollout"] * 5 + ["done"]
        assert next(events(client, two + path, rest[-1][1]))[0] == "done"
        # a rollout is the same as for other clients
        written = json.dumps(first[2]).encode()
        given = next(iter(service.stream(batch_id, cursor=0)))
        assert serialization.read(Rollout, written).rollout_id == given.rollout_id == wanted[0]
        # from the consumer's cursor on
        service.acknowledge_up_to(batch_id, rest[2][1], "trainer")
        assert ids(list(events(client, one + path))) == wanted[4:]
        assert ids(list(events(client, f"{one}{path}?cursor=0&consumer=x"))) == wanted


def test_group_events_contain_complete_groups(service: LocalFarm) -> None:
    wanted = placed_rollouts(service, 3, 2)
    batch_id = wanted[0].partition(".")[0]
    for rollout_id in wanted:
        run_to_end(service.store, rollout_id, reward=1.0)
    with served(service) as url, httpx2.Client() as client:
        found = list(events(client, f"{url}/v1/batches/{batch_id}/events?groups=true"))
        groups = [[each["rollout_id"] for each in data] for kind, _, data in found if kind == "group"]
        assert groups == [wanted[:2], wanted[2:4], wanted[4:]]
        again = list(events(client, f"{url}/v1/batches/{batch_id}/events?groups=true", found[0][1]))
        assert [kind for kind, _, _ in again] == ["group", "group", "done"]


@pytest.mark.parametrize(
    ("query", "last", "status"),
    [
        ("", "x", 400),
        ("", "-1", 400),
        ("", str(2**31), 400),
        ("", "7", 409),
        ("?cursor=7", "", 409),
        ("?cursor=x", "", 400),
        ("?consumer=%00", "", 400),
        ("?groups=perhaps", "", 400),
    ],
)
def test_invalid_event_requests_get_an_error_status(service: LocalFarm, query: str, last: str, status: int) -> None:
    batch_id = service.submit({"instances": [NOOP]})
    headers = SHOWN | ({"last-event-id": last} if last else {})
    with served(service) as url:
        assert httpx2.get(f"{url}/v1/batches/{batch_id}/events{query}", headers=headers).status_code == status
        assert httpx2.get(f"{url}/v1/batches/b0000000000/events", headers=SHOWN).status_code == 404
        assert httpx2.get(f"{url}/v1/batches/{batch_id}/events").status_code == 401


def test_stream_ends_when_its_key_is_revoked(service: LocalFarm) -> None:
    batch_id = service.submit({"instances": [NOOP]})
    with served(service) as url, farm.connect(url) as admin, httpx2.Client() as client:
        shown = {"x-api-key": admin.access.add_key("gone", ["read"])}
        with client.stream("GET", f"{url}/v1/batches/{batch_id}/events", headers=shown, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "retry: 1000"
            admin.access.revoke_key("gone")
            assert "event: error" in list(lines)


def test_open_streams_do_not_disturb_a_batch_and_end_with_the_api(service: LocalFarm) -> None:
    wanted = placed_rollouts(service, 1, 12)
    batch_id = wanted[0].partition(".")[0]
    idle = service.submit({"instances": [NOOP]})
    ended: list[int] = []

    def read_to_end(answer: httpx2.Response) -> None:
        ended.append(sum(1 for _ in answer.iter_lines()))

    with ExitStack() as stack:
        client = stack.enter_context(httpx2.Client(limits=httpx2.Limits(max_connections=None), headers=SHOWN))
        with served(service) as url, farm.connect(url) as trainer:
            for n in range(40):
                path = f"{url}/v1/batches/{(batch_id, idle)[n % 2]}/events"
                stack.enter_context(client.stream("GET", path, timeout=120))
            last = stack.enter_context(client.stream("GET", f"{url}/v1/batches/{idle}/events", timeout=120))
            thread = threading.Thread(target=read_to_end, args=(last,))
            thread.start()
            for rollout_id in wanted:
                run_to_end(service.store, rollout_id, reward=1.0)
            assert [rollout.rollout_id for rollout in trainer.stream(batch_id, timeout_s=120)] == wanted
        thread.join(60)
        assert len(ended) == 1


def linked(client: httpx2.Client, url: str, path: str) -> list[Any]:
    """Return all items of a list, following its links."""
    result: list[Any] = []
    while True:
        answer = client.get(url + path, headers=SHOWN)
        assert answer.status_code == 200, answer.text
        result += answer.json()
        if "link" not in answer.headers:
            return result
        path = answer.headers["link"].partition("<")[2].partition(">")[0]


def test_lists_are_paginated_with_links(service: LocalFarm) -> None:
    batch_ids = [service.submit({"instances": [NOOP], "n_samples": n + 1}) for n in range(7)]
    for name in ("n1", "n3", "n2"):
        node = Node(node=name, room=1, init_slots=1, run_slots=1, eval_slots=1, handlers=["noop"], info={})
        service.store.write(lambda connection, node=node: nodes.announce(connection, node))  # type: ignore[misc]
    with served(service) as url, httpx2.Client() as client, farm.connect(url) as remote:
        newest = [each["batch_id"] for each in linked(client, url, "/v1/batches?limit=2")]
        assert newest == batch_ids[::-1]
        assert [each["node"] for each in linked(client, url, "/v1/nodes?limit=1")] == ["n1", "n2", "n3"]
        rollouts = [each["rollout_id"] for each in linked(client, url, f"/v1/batches/{batch_ids[6]}/rollouts?limit=3")]
        assert rollouts == [f"{batch_ids[6]}.0.{n}" for n in range(7)]
        assert linked(client, url, f"/v1/rollouts/{rollouts[0]}/calls?limit=1") == []
        lent = [service.sandboxes.begin(BorrowRequest()).sandbox_id for _ in range(5)]
        service.sandboxes.stop(lent[3])
        sandboxes = [each["sandbox_id"] for each in linked(client, url, "/v1/sandboxes?limit=2")]
        assert sandboxes == [lent[n] for n in (4, 2, 1, 0)]
        assert [each["sandbox_id"] for each in linked(client, url, "/v1/sandboxes?limit=2&ended=true")] == lent[::-1]
        assert client.get(f"{url}/v1/sandboxes?before=s-0", headers=SHOWN).status_code == 404
        orders = [each["number"] for each in linked(client, url, "/v1/log?limit=3")]
        assert orders == [order.number for order in service.access.orders()]
        assert len(orders) == len(set(orders)) >= 13
        for n in (2, 0, 1):
            service.add_engine(f"http://127.0.0.{n + 1}:9/v1", "m")
            service.access.add_key(f"k{n}", ["read"])
        engines = [each["engine"]["url"] for each in linked(client, url, "/v1/engines?limit=2")]
        assert engines == [f"http://127.0.0.{n + 1}:9/v1" for n in range(3)]
        assert {each.engine.url for each in remote.engines()} == set(engines)
        assert [each["name"] for each in linked(client, url, "/v1/keys?limit=2")] == ["k0", "k1", "k2"]
        assert [each.name for each in list(remote.access.keys())] == ["k0", "k1", "k2"]
        for limit in (0, 1001):
            assert client.get(f"{url}/v1/batches?limit={limit}", headers=SHOWN).status_code == 400
        assert client.get(f"{url}/v1/batches?before=b0000000000", headers=SHOWN).status_code == 404
        each: Farm
        for each in (service, remote):
            assert [batch.batch_id for batch in each.batches(3, batch_ids[4])] == batch_ids[3:0:-1]
            assert len(each.rollouts(batch_ids[6])) == 7
            assert [one.sandbox_id for one in each.sandboxes.list(2, before=lent[4])] == [lent[2], lent[1]]
            assert [batch.submitter for batch in each.batches(1)] == [service.batches(1)[0].submitter]


def test_request_during_shutdown_gets_503_with_retry_after(
    service: LocalFarm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("farm.api.app._GRACE_PERIOD_S", 1)
    waiting = [service.sandboxes.begin(BorrowRequest()).sandbox_id for _ in range(20)]
    answers = []

    def ask(url: str, sandbox_id: str) -> None:
        path = f"{url}/v1/sandboxes/{sandbox_id}/exec"
        answers.append(httpx2.post(path, json={"argv": ["true"]}, headers=SHOWN, timeout=60))

    found = service.sandboxes.address
    asked: set[str] = set()

    def address(reference: str) -> Any:
        # each request asks again and again
        asked.add(reference)
        return found(reference)

    service.sandboxes.address = address  # type: ignore[method-assign]
    with served(service) as url:
        asking = [threading.Thread(target=ask, args=(url, sandbox_id)) for sandbox_id in waiting]
        for each in asking:
            each.start()
        until(lambda: asked == set(waiting), "all of them wait")
    for each in asking:
        each.join()
    assert {(each.status_code, each.headers["retry-after"]) for each in answers} == {(503, "1")}
    assert {each.json()["error"]["kind"] for each in answers} == {"FarmUnreachable"}
    assert not [record for record in caplog.records if record.exc_info]


def test_stream_waits_for_an_unavailable_database(service: LocalFarm) -> None:
    wanted = placed_rollouts(service, 1, 1)

    def away(*args: Any, **kwargs: Any) -> Any:
        raise StoreUnavailable("the database does not answer")

    with served(service) as url, httpx2.Client() as client:
        path = f"{url}/v1/batches/{wanted[0].partition('.')[0]}/events"
        with client.stream("GET", path, headers=SHOWN, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "retry: 1000"
            read, service.store.read = service.store.read, away  # type: ignore[method-assign]
            try:
                until(lambda: client.get(f"{url}/v1/nodes", headers=SHOWN).status_code == 503, "it is away")
            finally:
                service.store.read = read  # type: ignore[method-assign]
            run_to_end(service.store, wanted[0], reward=1.0)
            assert "event: done" in list(lines)
        assert [kind for kind, _, _ in events(client, path)] == ["rollout", "done"]
