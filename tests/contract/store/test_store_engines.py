"""The promises of the store about engines and their orders, on SQLite and on Postgres."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text, update

from farm.configuration.service_urls import normal_url
from farm.errors import InvalidRequest
from farm.records.engine import EngineInfo
from farm.records.engine_state import ACTIVE, EngineUse, StoredEngine
from farm.store import llm_engines
from farm.store.database import Store
from tests.secret_keys import key_of

A, B = "http://a:8000/v1", "http://b:8000/v1"
INFO = EngineInfo(kind="vllm", model="m", token_in="generate", token_out=True, control=True, notes=("x",))


def write(store: Store, verb: Any, *args: Any) -> Any:
    return store.write(lambda connection: verb(connection, *args))


def listed(store: Store) -> dict[str, StoredEngine]:
    return {engine.url: engine for engine in store.read(llm_engines.listing)}


def add(store: Store, engine: StoredEngine) -> None:
    store.write(lambda connection: llm_engines.add(connection, engine, key_of(store)))


@pytest.fixture
def two_engines(store: Store) -> Store:
    add(store, StoredEngine(A, "m"))
    add(store, StoredEngine(B, "m"))
    return store


class TestListing:
    def test_engines_are_listed_oldest_first_until_removed(self, two_engines: Store) -> None:
        assert list(listed(two_engines)) == [A, B]
        assert write(two_engines, llm_engines.remove, A)
        assert not write(two_engines, llm_engines.remove, A)
        assert list(listed(two_engines)) == [B]
        assert write(two_engines, llm_engines.clear) == 1
        assert listed(two_engines) == {}

    def test_engine_that_is_added_again_is_updated_and_redetected(self, store: Store) -> None:
        add(store, StoredEngine(A, "m"))
        write(store, llm_engines.set_info, A, INFO)
        write(store, llm_engines.set_failure, A, "gone")
        write(store, llm_engines.drain, A)
        write(store, llm_engines.set_paused, "drain", "me", None)
        add(store, StoredEngine(A, "m2", "secret", tokenizer="t", tool_format="hermes"))
        (engine,) = listed(store).values()
        assert (engine.model, engine.tokenizer, engine.tool_format) == ("m2", "t", "hermes")
        assert key_of(store).unseal(engine.key) == "secret"
        assert (engine.state, engine.info, engine.failure) == (ACTIVE, None, "")
        assert engine.paused == "drain", "who adds an engine does not know of the weight update that goes on"

    @pytest.mark.parametrize("written", [A, A + "/", "http://a:8000", " http://a:8000/v1 ", "HTTP://A:8000/v1//"])
    def test_address_is_normalised(self, store: Store, written: str) -> None:
        add(store, StoredEngine(written, "m"))
        assert write(store, llm_engines.drain, A)
        assert list(listed(store)) == [A]

    def test_default_port_and_ipv6_address_are_normalised(self) -> None:
        assert normal_url("https://Api.example:443") == normal_url("https://api.example/v1")
        assert normal_url("http://api.example:443") == "http://api.example:443/v1"
        assert normal_url("http://[::1]:8000/") == "http://[::1]:8000/v1"
        assert normal_url("http://a/Path/v1?x=1") == "http://a/Path/v1"

    @pytest.mark.parametrize("written", ["", "a:8000", "ftp://a/v1", "http:///v1", "http://a:port/v1", "http://[::1"])
    def test_invalid_address_is_refused(self, store: Store, written: str) -> None:
        with pytest.raises(InvalidRequest, match="url"):
            add(store, StoredEngine(written, "m"))

    def test_key_is_shown_nowhere(self, store: Store) -> None:
        add(store, StoredEngine(A, "m", "secret"))
        assert key_of(store).unseal(listed(store)[A].key) == "secret"
        assert "secret" not in repr(listed(store))

    def test_password_in_an_address_is_refused_and_not_shown(self, store: Store) -> None:
        with pytest.raises(InvalidRequest, match="password") as caught:
            add(store, StoredEngine("http://me:secret@a/v1", "m"))
        assert "secret" not in str(caught.value)

    @pytest.mark.parametrize("key", ["secret\nsecret", "sécret", "se cret", "secret" * 100])
    def test_invalid_key_is_refused_and_not_shown(self, store: Store, key: str) -> None:
        with pytest.raises(InvalidRequest, match="API key") as caught:
            add(store, StoredEngine(A, "m", key))
        assert "cret" not in str(caught.value)

    def test_node_removes_its_own_engines_except_kept_ones(self, two_engines: Store) -> None:
        add(two_engines, StoredEngine("http://n1/v1", added_by="n"))
        add(two_engines, StoredEngine("http://n2/v1", added_by="n"))
        write(two_engines, llm_engines.remove_of, "n", "http://n2/v1")
        assert list(listed(two_engines)) == [A, B, "http://n2/v1"]
        write(two_engines, llm_engines.remove_of, "n")
        assert list(listed(two_engines)) == [A, B]

    def test_engine_shared_with_others_stays_when_a_node_ends(self, two_engines: Store) -> None:
        for node in ("n1", "n2"):
            add(two_engines, StoredEngine("http://n/v1", added_by=node))
            add(two_engines, StoredEngine(A, added_by=node))
        add(two_engines, StoredEngine("http://own/v1", added_by="n2"))
        add(two_engines, StoredEngine("http://own/v1", added_by="n2"))
        write(two_engines, llm_engines.remove_of, "n2")
        assert list(listed(two_engines)) == [A, B, "http://n/v1"]

    def test_draining_engine_stays_listed(self, two_engines: Store) -> None:
        assert write(two_engines, llm_engines.drain, B)
        assert not write(two_engines, llm_engines.drain, "http://c/v1")
        assert {url: engine.state for url, engine in listed(two_engines).items()} == {A: "active", B: "draining"}

    def test_detected_info_and_failure_are_stored(self, two_engines: Store) -> None:
        write(two_engines, llm_engines.set_failure, A, "x" * 5000)
        assert len(listed(two_engines)[A].failure) == 1000
        write(two_engines, llm_engines.set_info, A, INFO)
        assert (listed(two_engines)[A].info, listed(two_engines)[A].failure, listed(two_engines)[B].info) == (
            INFO,
            "",
            None,
        )


class TestStoredOrders:
    def test_repeated_pause_is_one_order(self, two_engines: Store) -> None:
        for _ in range(2):
            write(two_engines, llm_engines.set_paused, "drain", "me", None)
        engine = listed(two_engines)[A]
        assert (engine.paused, engine.paused_by, engine.n_orders, engine.n_done) == ("drain", "me", 1, 0)
        assert 0 <= engine.paused_s < 60
        write(two_engines, llm_engines.set_paused, "abort", "you", [A])
        assert [(each.paused, each.n_orders) for each in listed(two_engines).values()] == [("abort", 2), ("drain", 1)]
        write(two_engines, llm_engines.set_paused, "", "", None)
        write(two_engines, llm_engines.set_paused, "", "", None)
        assert [(each.paused, each.paused_by, each.n_orders) for each in listed(two_engines).values()] == [
            ("", "", 3),
            ("", "", 2),
        ]

    def test_orders_done_before_a_new_registration_do_not_count(self, two_engines: Store) -> None:
        write(two_engines, llm_engines.set_paused, "drain", "me", None)
        write(two_engines, llm_engines.set_version, "7", None)
        write(two_engines, llm_engines.clear)
        add(two_engines, StoredEngine(A))
        # from a worker that has not seen the change
        write(two_engines, llm_engines.carried_out, A, 2, "drain", "7")
        engine = listed(two_engines)[A]
        assert (engine.n_orders, engine.n_done, engine.engine_paused, engine.engine_version) == (0, 0, "", "")

    def test_change_of_pause_mode_keeps_its_start_time(self, two_engines: Store) -> None:
        def first_paused() -> float:
            result = two_engines.read(
                lambda connection: connection.execute(text("SELECT paused_at FROM engines")).scalars()
            )
            return float(max(result))

        write(two_engines, llm_engines.set_paused, "drain", "me", None)
        before = first_paused()
        write(two_engines, llm_engines.set_paused, "abort", "me", None)
        assert first_paused() == before

    def test_order_is_done_once_carried_out_and_older_ones_are_ignored(self, two_engines: Store) -> None:
        write(two_engines, llm_engines.set_paused, "keep", "me", None)
        write(two_engines, llm_engines.set_version, "7", None)
        write(two_engines, llm_engines.carried_out, A, 2, "keep", "7")
        write(two_engines, llm_engines.carried_out, A, 1, "keep", "")
        engine = listed(two_engines)[A]
        assert (engine.n_orders, engine.n_done, engine.engine_paused, engine.engine_version) == (2, 2, "keep", "7")
        assert listed(two_engines)[B].n_done == 0

    def test_version_is_set_again_only_on_engines_that_missed_it(self, two_engines: Store) -> None:
        write(two_engines, llm_engines.set_version, "7", None)
        write(two_engines, llm_engines.carried_out, A, 1, "", "7")
        write(two_engines, llm_engines.carried_out, B, 1, "", "")
        write(two_engines, llm_engines.set_version, "7", None)
        assert [each.n_orders for each in listed(two_engines).values()] == [1, 2]


class TestUsers:
    def test_reports_of_live_users_are_listed(self, two_engines: Store) -> None:
        write(two_engines, llm_engines.report, "w1", {A: EngineUse(1, 2, 300)})
        write(two_engines, llm_engines.report, "w2", {})
        write(two_engines, llm_engines.report, "w1", {A: EngineUse(2, 1, 100), B: EngineUse(0)})
        both_live = {"w1": {A: EngineUse(2, 1, 100), B: EngineUse(0, 0, 0)}, "w2": {}}
        assert two_engines.read(lambda connection: llm_engines.uses(connection, 60.0)) == both_live
        assert two_engines.read(lambda connection: llm_engines.uses(connection, -60.0)) == {}
        write(two_engines, llm_engines.forget_user, "w1")
        assert two_engines.read(lambda connection: llm_engines.uses(connection, 60.0)) == {"w2": {}}
        write(two_engines, llm_engines.forget_users, -60.0)
        assert two_engines.read(lambda connection: llm_engines.uses(connection, 60.0)) == {}


class TestWeights:
    """An engine gets calls only while it has the farm's present weights; otherwise its record says why."""

    @staticmethod
    def named(store: Store, url: str, version: str) -> None:
        write(store, llm_engines.set_info, url, INFO)
        write(store, llm_engines.set_version, version, [url])
        write(store, llm_engines.carried_out, url, listed(store)[url].n_orders, "", version)

    def test_engine_with_weights_is_ready_and_restarted_one_is_not(self, two_engines: Store) -> None:
        assert {engine.status for engine in listed(two_engines).values()} == {"unknown"}
        for url in (A, B):
            self.named(two_engines, url, "7")
        assert {(engine.status, engine.trouble) for engine in listed(two_engines).values()} == {("ready", "")}
        write(two_engines, llm_engines.carried_out, A, listed(two_engines)[A].n_done, "", "default")
        engine = listed(two_engines)[A]
        assert engine.status == "without weights"
        assert "lacks version 7" in engine.trouble
        assert "'default'" in engine.trouble
        assert listed(two_engines)[B].status == "ready"

    def test_new_engine_expects_the_weights_of_its_model(self, two_engines: Store) -> None:
        self.named(two_engines, A, "7")
        write(two_engines, llm_engines.set_version, "7", [A], "/shared/7")
        add(two_engines, StoredEngine("http://new/v1", "m"))
        add(two_engines, StoredEngine("http://judge/v1", "another"))
        result = listed(two_engines)
        new, judge = result["http://new/v1"], result["http://judge/v1"]
        assert (new.version, new.weights_path, new.n_orders, new.lacks_weights) == ("7", "/shared/7", 0, True)
        assert (judge.version, judge.lacks_weights) == ("", False), "of another model"

    @pytest.mark.parametrize(
        "away",
        [
            (llm_engines.clear,),
            (llm_engines.remove_of, "n"),
            (llm_engines.remove, A),
        ],
    )
    def test_version_outlives_its_engines(self, store: Store, away: tuple[Any, ...]) -> None:
        add(store, StoredEngine(A, "m", added_by="n"))
        write(store, llm_engines.set_version, "6", None)
        write(store, llm_engines.set_version, "7", None, "/shared/7")
        write(store, *away)
        assert store.read(llm_engines.newest_version) == "7"
        add(store, StoredEngine(B, "m"))
        add(store, StoredEngine("http://judge/v1", "another"))
        result = listed(store)
        assert (result[B].version, result[B].weights_path, result[B].lacks_weights) == ("7", "/shared/7", True)
        assert not result["http://judge/v1"].lacks_weights
        write(store, llm_engines.set_version, "3", [B])
        write(store, llm_engines.clear)
        assert store.read(llm_engines.newest_version) == "3", "what was named last, also by a trainer that went back"

    def test_versions_are_forgotten_on_request(self, two_engines: Store) -> None:
        write(two_engines, llm_engines.set_version, "7", None)
        assert write(two_engines, llm_engines.clear, True) == 2
        assert two_engines.read(llm_engines.newest_version) == ""
        add(two_engines, StoredEngine(A, "m"))
        assert not listed(two_engines)[A].lacks_weights

    def test_version_of_another_model_does_not_apply(self, two_engines: Store) -> None:
        write(two_engines, llm_engines.set_version, "900", None)
        write(two_engines, llm_engines.clear)
        add(two_engines, StoredEngine(A, "another"))
        assert two_engines.read(llm_engines.newest_version) == ""

    def test_farm_without_versions_expects_no_weights(self, two_engines: Store) -> None:
        add(two_engines, StoredEngine("http://new/v1", "m"))
        assert not any(engine.lacks_weights for engine in listed(two_engines).values())

    def test_weights_path_belongs_to_its_version_only(self, two_engines: Store) -> None:
        write(two_engines, llm_engines.set_version, "7", None, "/shared/7")
        write(two_engines, llm_engines.set_version, "7", None)
        assert {engine.weights_path for engine in listed(two_engines).values()} == {"/shared/7"}
        write(two_engines, llm_engines.set_version, "8", None)
        assert {engine.weights_path for engine in listed(two_engines).values()} == {""}

    @pytest.mark.parametrize("n_heartbeats", [0, 1])
    def test_engines_of_a_silent_trainer_are_abandoned(self, two_engines: Store, n_heartbeats: int) -> None:
        write(two_engines, llm_engines.set_paused, "drain", "host/1", None, True)
        for _ in range(n_heartbeats):
            write(two_engines, llm_engines.hold, "host/1", None)
        assert {engine.status for engine in listed(two_engines).values()} == {"paused"}
        silent = update(llm_engines.engines).values(held_at=llm_engines.engines.c.held_at - 60)
        two_engines.write(lambda connection: connection.execute(silent) and None)
        engine = listed(two_engines)[A]
        assert (engine.status, engine.abandoned) == ("abandoned", True)
        assert "host/1" in engine.trouble
        assert "farm engines resume" in engine.trouble
        write(two_engines, llm_engines.hold, "host/2", None)
        assert listed(two_engines)[A].abandoned, "another's sign of life is none of its"

    def test_next_weight_update_takes_engines_over(self, two_engines: Store) -> None:
        write(two_engines, llm_engines.set_paused, "drain", "host/1", None)
        write(two_engines, llm_engines.hold, "host/1", None)
        silent = update(llm_engines.engines).values(held_at=llm_engines.engines.c.held_at - 60)
        two_engines.write(lambda connection: connection.execute(silent) and None)
        write(two_engines, llm_engines.set_paused, "drain", "host/2", None)
        engine = listed(two_engines)[A]
        assert (engine.paused_by, engine.status, engine.n_orders) == ("host/2", "paused", 1)
        write(two_engines, llm_engines.hold, "host/1", None)
        assert listed(two_engines)[A].silent_s == 0.0

    def test_manual_pause_is_never_abandoned(self, two_engines: Store) -> None:
        write(two_engines, llm_engines.set_paused, "drain", "host/1", None)
        assert {engine.status for engine in listed(two_engines).values()} == {"paused"}
