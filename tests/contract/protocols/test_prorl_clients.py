"""The rollouts that ProRL's requests get: repeats, retries, restarted clients, killed API processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx2
import pytest

from farm.api.prorl import jobs
from farm.client.local import LocalFarm
from farm.notifications import Signals
from farm.records.rollout import Stage
from farm.store import leader
from farm.store.database import Store
from tests.contract.store.test_store import claimed, fail, place, run_to_end
from tests.doubles import EngineDouble
from tests.services.api import served
from tests.services.farms import until
from tests.services.wire_clients import WireClient, submitted
from workers.testing.serving import serving

SERVER = "http://127.0.0.1:9"
INSTANCE = {"data_source": "noop", "instance_id": "p1"}
BODY = {"instance": INSTANCE, "sampling_params": {"model": "m"}, "job_id": "p1"}
UNNAMED = {"instance": INSTANCE, "sampling_params": {"model": "m"}}
SAMPLE = {"instance": {**INSTANCE, "trajectory_id": 0}, "sampling_params": {"model": "m"}}
Answer = Future[httpx2.Response]


@pytest.fixture
def service(sqlite_store: Store) -> LocalFarm:
    return LocalFarm(sqlite_store, Signals(""), 1_000_000)


@pytest.fixture
def client(service: LocalFarm) -> Iterator[WireClient]:
    with served(service, speak=("prorl",)) as url, ThreadPoolExecutor(12) as pool:
        yield start_session(WireClient(f"{url}/prorl", pool))


def start_session(client: WireClient) -> WireClient:
    """Return a client that begins as a trainer's program does."""
    client.post("/clear_llm_server")
    client.post("/add_llm_server", {"address": SERVER})
    client.post("/start")
    return client


def rollout_of(answer: Answer) -> Any:
    return answer.result(60).json()["rollout_id"]


def run_rollout(service: LocalFarm, batch_id: str) -> str:
    place(service.store, batch_id)
    run_to_end(service.store, f"{batch_id}.0.0")
    return f"{batch_id}.0.0"


def abandon_request(client: WireClient, service: LocalFarm, body: dict[str, Any]) -> str:
    """Send a request and leave before its answer; return its batch."""
    before = set(service.recent())
    client.give_up("/process", body)
    [batch_id] = set(service.recent()) - before
    until(lambda: any(not each.is_held for each in claims(service)), "it is seen that the client left")
    return batch_id


def claims(service: LocalFarm) -> list[leader.ClaimedRole]:
    """Return all claims on rollouts, without the leases of processes."""
    found = service.store.read(partial(leader.claims_of, begin="", lease_s=10.0))
    return [each for each in found if each.role != each.owner]


@pytest.mark.parametrize("body", [BODY, UNNAMED, SAMPLE])
def test_concurrent_repeats_are_separate_samples(client: WireClient, service: LocalFarm, body: dict[str, Any]) -> None:
    answers = [client.later("/process", body) for _ in range(4)]
    names = {run_rollout(service, batch_id) for batch_id in submitted(service, 4)}
    assert {rollout_of(answer) for answer in answers} == names
    assert claims(service) == []


@pytest.mark.parametrize("body", [BODY, UNNAMED, SAMPLE])
def test_repeat_after_an_answer_is_a_new_sample(client: WireClient, service: LocalFarm, body: dict[str, Any]) -> None:
    first = client.later("/process", body)
    [batch_id] = submitted(service)
    name = run_rollout(service, batch_id)
    assert rollout_of(first) == name
    second = client.later("/process", body)
    [other] = set(submitted(service, 2)) - {batch_id}
    assert run_rollout(service, other) == rollout_of(second) != name


@pytest.mark.parametrize("body", [BODY, UNNAMED, SAMPLE])
@pytest.mark.parametrize("ended", [False, True])
def test_repeat_after_a_disconnect_gets_the_same_rollout(
    client: WireClient, service: LocalFarm, body: dict[str, Any], ended: bool
) -> None:
    batch_id = abandon_request(client, service, body)
    if ended:
        run_rollout(service, batch_id)
    again = client.later("/process", body)
    until(lambda: all(each.is_held for each in claims(service)), "it is taken over")
    if not ended:
        run_rollout(service, batch_id)
    assert rollout_of(again) == f"{batch_id}.0.0"
    assert service.recent() == [batch_id]


def test_different_request_gets_no_abandoned_rollout(client: WireClient, service: LocalFarm) -> None:
    batch_id = abandon_request(client, service, BODY)
    others = [
        BODY | {"sampling_params": {"model": "m", "temperature": 0.5}},
        BODY | {"instance": INSTANCE | {"seconds": 1.0}},
        BODY | {"job_id": "p2"},
        UNNAMED,
        SAMPLE,
    ]
    answers = [client.later("/process", body) for body in others]
    ids = set(submitted(service, 1 + len(others))) - {batch_id}
    names = {run_rollout(service, each) for each in ids}
    assert {rollout_of(answer) for answer in answers} == names


@pytest.mark.parametrize("was_answered", [False, True])
def test_failed_rollout_is_replaced_for_a_repeated_request(
    client: WireClient, service: LocalFarm, was_answered: bool
) -> None:
    if was_answered:
        first = client.later("/process", BODY)
        [broken] = submitted(service)
    else:
        broken = abandon_request(client, service, BODY)
    place(service.store, broken)
    fail(service.store, claimed(service.store, f"{broken}.0.0", Stage.INIT), None)
    if was_answered:
        assert first.result(60).json()["critical_error"] == "init"
    second = client.later("/process", BODY)
    [batch_id] = set(submitted(service, 2)) - {broken}
    assert run_rollout(service, batch_id) == rollout_of(second)


@pytest.mark.parametrize("sign", ["/clear_llm_server", "/start"])
def test_new_session_gets_no_rollout_of_the_old_one(client: WireClient, service: LocalFarm, sign: str) -> None:
    left, ended = abandon_request(client, service, SAMPLE), abandon_request(client, service, BODY)
    run_rollout(service, ended)
    waited_for = client.later("/process", UNNAMED)
    [awaited] = set(submitted(service, 3)) - {left, ended}
    assert client.post(sign).status_code == (400 if sign == "/start" else 200)
    client.post("/add_llm_server", {"address": SERVER})
    assert service.status(left).done, "nobody waits for it"
    assert not service.status(awaited).done
    answers = [client.later("/process", body) for body in (SAMPLE, BODY, UNNAMED)]
    ids = set(submitted(service, 6)) - {left, ended, awaited}
    names = {run_rollout(service, each) for each in ids}
    assert {rollout_of(answer) for answer in answers} == names
    assert run_rollout(service, awaited) == rollout_of(waited_for)
    client.post("/stop")
    assert all(service.status(batch_id).done for batch_id in service.recent())


def test_stop_cancels_jobs_of_earlier_sessions(client: WireClient, service: LocalFarm) -> None:
    answer = client.later("/process", BODY)
    [batch_id] = submitted(service)
    client.post("/clear_llm_server")
    client.post("/stop")
    assert answer.result(60).json()["error"] == "cancelled"
    assert service.status(batch_id).done


def test_claims_of_a_dead_api_process_are_taken_over_and_live_ones_kept(
    client: WireClient, service: LocalFarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_LEASE_S", 2.0)
    with served(service, speak=("prorl",)) as url, ThreadPoolExecutor(4) as pool:
        other = WireClient(f"{url}/prorl", pool)
        mine = client.later("/process", BODY)
        [first] = submitted(service)
        its = other.later("/process", BODY)
        [second] = set(submitted(service, 2)) - {first}
        names = [run_rollout(service, each) for each in (first, second)]
        assert [rollout_of(mine), rollout_of(its)] == names
    # a killed process leaves its claims and a lease that nobody renews
    killed = "api-0123456789abcdef"
    batch_id = abandon_request(client, service, BODY)
    [claim] = claims(service)
    service.store.write(partial(leader.acquire_leadership, role=killed, owner=killed, lease_s=2.0))
    assert service.store.write(partial(leader.pass_claim, role=claim.role, owner="", to=killed))
    again = client.later("/process", BODY)
    until(lambda: claims(service)[0].owner != killed, "it is taken over")
    assert run_rollout(service, batch_id) == rollout_of(again)
    assert len(service.recent()) == 3


def test_answer_taken_over_by_another_request_is_given_once(client: WireClient, service: LocalFarm) -> None:
    answer = client.later("/process", BODY)
    [batch_id] = submitted(service)
    [claim] = claims(service)
    assert service.store.write(partial(leader.pass_claim, role=claim.role, owner=claim.owner, to=""))
    run_rollout(service, batch_id)
    assert answer.result(60).status_code == 503
    assert rollout_of(client.later("/process", BODY)) == f"{batch_id}.0.0"


def test_refused_request_claims_nothing(client: WireClient, service: LocalFarm) -> None:
    for body in (
        BODY | {"instance": {"data_source": "nope"}},
        BODY | {"instance": {"data_source": "deepscaler", "prompt": "2+2"}},
        BODY | {"sampling_params": {"model": "m", "api_key": "a b"}},
    ):
        assert client.post("/process", body).status_code in (400, 422)
    assert claims(service) == []


def test_process_lease_ends_without_waiting_requests(client: WireClient, service: LocalFarm) -> None:
    answer = client.later("/process", BODY)
    [batch_id] = submitted(service)
    run_rollout(service, batch_id)
    answer.result(60)
    until(lambda: not _renewing(), "the thread that renews it ends")
    assert rollout_of_next(client, service, {batch_id})


def _renewing() -> bool:
    return any(thread.name == "prorl-askers" for thread in threading.enumerate())


def rollout_of_next(client: WireClient, service: LocalFarm, before: set[str]) -> Any:
    answer = client.later("/process", BODY)
    [batch_id] = set(submitted(service, len(before) + 1)) - before
    until(_renewing, "it is renewed again")
    run_rollout(service, batch_id)
    return rollout_of(answer)


def test_job_without_model_is_refused_where_its_server_lists_none(service: LocalFarm, client: WireClient) -> None:
    unnamed = {"instance": INSTANCE, "sampling_params": {}}
    with serving(EngineDouble(wire="prorl", model="scripted").app()) as engine:
        client.post("/clear_llm_server")
        client.post("/add_llm_server", {"address": engine})
        answer = client.post("/process", unnamed)
        assert (answer.status_code, service.recent()) == (422, [])
        assert "lists no model" in answer.text
    # it is indistinguishable from a process that does not answer
    waits = client.later("/process", unnamed)
    submitted(service)
    client.post("/stop")
    assert waits.result(60).json()["error"] == "cancelled"
