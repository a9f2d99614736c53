"""Pause, push weights, resume: a client and two workers that share a store, with calls in flight all the time."""

from __future__ import annotations

import _thread
import asyncio
import re
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest

from farm.client.local import LocalFarm
from farm.errors import FarmUnreachable, InvalidRequest, NotFound
from farm.notifications import Signals
from farm.records.engine_state import EngineUse
from farm.store import llm_engines
from farm.store.database import Store
from tests.secret_keys import key_of
from tests.services.engines import CONTROLLED, Server, Servers, engine_call, routed
from tests.services.farms import until
from workers.policy.routing.pool import EnginePool
from workers.policy.routing.router import RoutingKey, StickyRouter
from workers.process.engine_registry import EngineRegistry

BOTH_STORES = pytest.mark.parametrize("store", ["sqlite_store", "postgres_store"], indirect=True)


class Workers:
    """The engine-related part of two worker processes, on one event loop in a thread."""

    def __init__(self, store: Store, broker_url: str, servers: Servers) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.signals = Signals(broker_url)
        self.fleets = [EngineRegistry(store, self.signals, f"n1/run/{number}", key_of(store)) for number in range(2)]
        self.pools = [
            EnginePool(fleet, open_engine=servers.open, detect=servers.detect, reporter=fleet) for fleet in self.fleets
        ]
        for fleet, pool in zip(self.fleets, self.pools, strict=True):
            fleet.on_change = pool.changed
            fleet.start()
            self.run(pool.start()).result(10)

    def run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, number: int, n_tokens: int = 20) -> Future[Any]:
        """Start a call of about 0.2 s."""
        router = StickyRouter(self.pools[number % 2], RoutingKey(f"r{number}"))
        return self.run(routed(router, n_tokens, engine_call(n_tokens, f"r{number}")))

    def close(self) -> None:
        for fleet, pool in zip(self.fleets, self.pools, strict=True):
            self.run(pool.aclose()).result(10)
            fleet.close()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.signals.close()


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Store:
    """Return a store with the farm's tables: Postgres, unless a test asks for both kinds of database.

    The statements themselves are tested on both by tests/contract/store.
    """
    result: Store = request.getfixturevalue(getattr(request, "param", "postgres_store"))
    return result


@pytest.fixture
def controlled() -> Server:
    return Server("told", info=CONTROLLED)


@pytest.fixture
def uncontrolled() -> Server:
    return Server("plain")


@pytest.fixture
def client(store: Store, broker_url: str, controlled: Server, uncontrolled: Server) -> Iterator[LocalFarm]:
    signals = Signals(broker_url)
    verbs = LocalFarm(store, signals, 1000, workers_s=0.5)
    for server in (controlled, uncontrolled):
        verbs.add_engine(server.url)
    yield verbs
    signals.close()


@pytest.fixture
def workers(
    store: Store, broker_url: str, client: LocalFarm, controlled: Server, uncontrolled: Server
) -> Iterator[Workers]:
    started = Workers(store, broker_url, Servers(controlled, uncontrolled))
    until(lambda: all(state.engine.info is not None for state in client.engines()), "the engines are found out")
    yield started
    started.close()


@contextmanager
def continuous_calls(workers: Workers, n: int = 12) -> Iterator[list[Future[Any]]]:
    """Make calls continuously while the block runs; all must succeed."""
    stop = threading.Event()
    rollouts: list[Future[Any]] = []

    async def call_repeatedly(number: int) -> None:
        router = StickyRouter(workers.pools[number % 2], RoutingKey(f"r{number}"))
        while not stop.is_set():
            await routed(router, 20, engine_call(20, f"r{number}"))

    rollouts += [workers.run(call_repeatedly(number)) for number in range(n)]
    try:
        yield rollouts
    finally:
        stop.set()
    for rollout in rollouts:
        rollout.result(30)


@BOTH_STORES
@pytest.mark.parametrize("mode", ["drain", "keep", "abort"])
def test_weights_are_updated_between_calls_and_all_rollouts_continue(
    client: LocalFarm, workers: Workers, controlled: Server, uncontrolled: Server, mode: Any
) -> None:
    with continuous_calls(workers):
        until(lambda: controlled.answered and uncontrolled.answered, "calls are under way")
        with client.weight_update("7", mode, None, 30.0) as paused:
            assert [engine.url for engine in paused] == [controlled.url, uncontrolled.url]
            assert uncontrolled.n_running == 0, "nobody can tell this one to keep or abort what runs"
            if mode == "drain":
                assert controlled.n_running == 0
            paused_at = workers.loop.time()
            assert {state.engine.paused for state in client.engines()} == {mode}
            client.set_version("6")
            resumed_at = workers.loop.time()
        n_answered = len(controlled.answered), len(uncontrolled.answered)
        until(
            lambda: len(controlled.answered) > n_answered[0] and len(uncontrolled.answered) > n_answered[1],
            "calls go on",
        )
    started = [at for server in (controlled, uncontrolled) for at, _ in server.started]
    assert not [at for at in started if paused_at < at < resumed_at], "nothing starts while weights change"
    assert controlled.received == [f"pause {mode}", "version 6", "version 7", "resume"], "by one worker alone, once"
    assert [state.engine.version for state in client.engines()] == ["7", "7"]
    assert {pool.newest_version for pool in workers.pools} == {"7"}


def test_abort_ends_calls_that_arrived_during_the_order(
    client: LocalFarm, workers: Workers, controlled: Server, uncontrolled: Server
) -> None:
    client.remove_engine(uncontrolled.url)
    with continuous_calls(workers):
        controlled.is_far = True
        until(lambda: controlled.n_travelling, "calls are under way")
        began = time.monotonic()
        with client.weight_update("7", "abort", None, 30.0):
            took_s = time.monotonic() - began
            assert controlled.n_running == 0
            controlled.is_far = False
    assert took_s < 10.0
    assert controlled.received[:2] == ["pause abort", "pause abort"]


def test_selected_engines_are_paused(
    client: LocalFarm, workers: Workers, controlled: Server, uncontrolled: Server
) -> None:
    client.pause_engines("drain", [controlled.url], 30.0)
    assert {workers.call(number).result(30) for number in range(8)} == {uncontrolled.url}
    client.resume_engines([controlled.url])
    assert controlled.received == ["pause drain", "resume"]


def test_pause_timeout_names_running_calls_and_keeps_the_order(
    client: LocalFarm, workers: Workers, uncontrolled: Server
) -> None:
    uncontrolled.hangs = True
    calls = [workers.call(number) for number in range(8)]
    until(lambda: uncontrolled.n_running, "a call hangs")

    def complaint() -> str:
        with pytest.raises(TimeoutError, match=r"did not pause \(drain\) in 1 s: ") as caught:
            client.pause_engines("drain", None, 1.0)
        return str(caught.value)

    until(lambda: re.search(r"n1/run/\d has \d calls? in flight", complaint()), "the workers have heard of it")
    assert {state.engine.paused for state in client.engines()} == {"drain"}
    client.pause_engines("abort", None, 30.0)
    uncontrolled.hangs = False
    client.resume_engines()
    for call in calls:
        call.result(30)


def test_pause_without_workers_is_an_error_and_pauses_nothing(client: LocalFarm) -> None:
    with pytest.raises(FarmUnreachable, match="no worker"):
        client.pause_engines("drain", None, 30.0)
    assert {state.engine.paused for state in client.engines()} == {""}


def test_failed_weight_update_leaves_engines_paused_and_reports_it(
    client: LocalFarm, workers: Workers, controlled: Server
) -> None:
    with pytest.raises(RuntimeError, match="disk full") as caught, client.weight_update("7", "drain", None, 30.0):
        raise RuntimeError("disk full")
    assert "stay paused" in caught.value.__notes__[0]
    state = client.engines()[0]
    assert (state.engine.paused, state.engine.version) == ("drain", "")
    assert state.engine.paused_by
    client.resume_engines()
    assert controlled.received == ["pause drain", "resume"]


@BOTH_STORES
def test_killed_worker_does_not_block_a_pause_once_removed(
    client: LocalFarm, workers: Workers, store: Store, controlled: Server
) -> None:
    store.write(
        lambda connection: llm_engines.report(connection, "n1/run/dead", {controlled.url: EngineUse(0, 3, 100)})
    )
    with pytest.raises(TimeoutError, match="n1/run/dead"):
        client.pause_engines("drain", None, 1.0)
    store.write(lambda connection: llm_engines.forget_user(connection, "n1/run/dead"))
    client.pause_engines("drain", None, 30.0)
    client.resume_engines()


def test_out_of_service_engine_misses_the_version_and_is_named(
    client: LocalFarm, workers: Workers, controlled: Server, uncontrolled: Server
) -> None:
    controlled.dead = True
    client.pause_engines("drain", None, 30.0)
    assert client.set_version("7") == [controlled.url]
    client.resume_engines()
    assert workers.call(0).result(30) == uncontrolled.url
    controlled.dead = False
    until(lambda: client.set_version("7") == [], "it is told once it is back")
    until(lambda: controlled.url in [workers.call(number).result(30) for number in range(8)], "it is used again")


def test_engine_restarted_during_an_update_does_not_have_the_weights(
    client: LocalFarm, workers: Workers, controlled: Server, uncontrolled: Server
) -> None:
    with client.weight_update("7", "drain", None, 30.0):
        controlled.paused = False
    assert {state.engine.url: state.engine.engine_version for state in client.engines()} == {
        controlled.url: "default",
        uncontrolled.url: "7",
    }
    assert {workers.call(number).result(30) for number in range(8)} == {uncontrolled.url}
    assert client.set_version("7") == []
    until(lambda: controlled.url in [workers.call(number).result(30) for number in range(8)], "it is used again")


def test_update_interrupted_before_the_pause_pauses_nothing(
    client: LocalFarm, workers: Workers, uncontrolled: Server
) -> None:
    uncontrolled.hangs = True
    calls = [workers.call(number) for number in range(8)]
    until(lambda: uncontrolled.n_running, "a call hangs")
    alarm = threading.Timer(0.5, _thread.interrupt_main)
    alarm.start()
    with pytest.raises(KeyboardInterrupt), client.weight_update("7", "drain", None, 30.0):
        pytest.fail("it is not paused")
    assert {state.engine.paused for state in client.engines()} == {""}
    uncontrolled.hangs = False
    for call in calls:
        call.result(30)


@BOTH_STORES
def test_calls_in_flight_are_listed(
    client: LocalFarm, workers: Workers, uncontrolled: Server, controlled: Server
) -> None:
    uncontrolled.hangs = controlled.hangs = True
    calls = [workers.call(number, 100) for number in range(4)]
    until(lambda: sum(state.n_calls for state in client.engines()) == 4, "the workers have reported")
    assert sum(state.n_tokens for state in client.engines()) == 400
    uncontrolled.hangs = controlled.hangs = False
    for call in calls:
        call.result(30)


def test_invalid_orders_are_refused(client: LocalFarm) -> None:
    with pytest.raises(InvalidRequest, match="mode"):
        client.pause_engines("gently")  # type: ignore[arg-type]
    with pytest.raises(NotFound, match="nowhere"):
        client.pause_engines("drain", ["http://nowhere/v1"])
    with pytest.raises(InvalidRequest, match="version"):
        client.set_version("")
    with pytest.raises(InvalidRequest, match="version"):
        client.set_version("7" * 65)


def test_weight_update_without_redis_polls_the_store(
    store: Store, client: LocalFarm, controlled: Server, uncontrolled: Server
) -> None:
    broker_url = "amqp://guest@localhost//"
    workers, signals = Workers(store, broker_url, Servers(controlled, uncontrolled)), Signals(broker_url)
    try:
        with LocalFarm(store, signals, 1000).weight_update("7", "drain", None, 30.0):
            assert controlled.received == ["pause drain"]
        assert {workers.call(number).result(30) for number in range(8)} == {controlled.url, uncontrolled.url}
    finally:
        workers.close()
        signals.close()


@BOTH_STORES
def test_ended_worker_is_removed_from_engine_users(client: LocalFarm, workers: Workers, store: Store) -> None:
    until(lambda: len(store.read(lambda connection: llm_engines.uses(connection, 60.0))) == 2, "both have reported")
    workers.fleets[0].close()
    assert list(store.read(lambda connection: llm_engines.uses(connection, 60.0))) == ["n1/run/1"]


def test_unconfirmed_update_names_its_engines(client: LocalFarm, workers: Workers, controlled: Server) -> None:
    controlled.dead = True
    with (
        pytest.raises(TimeoutError, match=f"no engine confirmed version 7: {controlled.url}") as error,
        client.weight_update("7", "drain", [controlled.url], 5.0),
    ):
        pass
    assert any("the engines stay paused" in note for note in error.value.__notes__)
