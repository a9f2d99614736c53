"""The promises of the store about engines, kept alike by SQLite and Postgres: who may be used, and what was ordered."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import text, update

from farm.engine import EngineInfo
from farm.errors import InvalidRequest
from farm.store import engines, migrations
from farm.store.engine import Store
from farm.store.engines import Engine, Use

A, B = "http://a:8000/v1", "http://b:8000/v1"
INFO = EngineInfo(kind="vllm", model="m", token_in="generate", token_out=True, control=True, notes=("x",))


def write(store: Store, verb: Any, *args: Any) -> Any:
    return store.write(lambda connection: verb(connection, *args))


def listed(store: Store) -> dict[str, Engine]:
    return {engine.url: engine for engine in store.read(engines.listing)}


@pytest.fixture
def both(store: Store) -> Store:
    write(store, engines.add, Engine(A, "m"))
    write(store, engines.add, Engine(B, "m"))
    return store


class TestListing:
    def test_they_are_listed_oldest_first_until_removed(self, both: Store) -> None:
        assert list(listed(both)) == [A, B]
        assert write(both, engines.remove, A)
        assert not write(both, engines.remove, A)
        assert list(listed(both)) == [B]
        assert write(both, engines.clear) == 1
        assert listed(both) == {}

    def test_the_same_again_says_what_holds_now_and_is_asked_anew(self, store: Store) -> None:
        write(store, engines.add, Engine(A, "m"))
        write(store, engines.set_info, A, INFO)
        write(store, engines.set_failure, A, "gone")
        write(store, engines.drain, A)
        write(store, engines.set_paused, "drain", "me", None)
        write(store, engines.add, Engine(A, "m2", "secret", tokenizer="t", tool_format="hermes"))
        (engine,) = listed(store).values()
        assert (engine.model, engine.key, engine.tokenizer, engine.tool_format) == ("m2", "secret", "t", "hermes")
        assert (engine.state, engine.info, engine.failure) == (engines.ACTIVE, None, "")
        assert engine.paused == "drain", "who adds an engine does not know of the weight update that goes on"

    @pytest.mark.parametrize("written", [A, A + "/", "http://a:8000", " http://a:8000/v1 ", "HTTP://A:8000/v1//"])
    def test_an_address_is_one_however_it_is_written(self, store: Store, written: str) -> None:
        write(store, engines.add, Engine(written, "m"))
        assert write(store, engines.drain, A)
        assert list(listed(store)) == [A]

    def test_what_an_older_farm_wrote_otherwise_can_be_removed(self, both: Store) -> None:
        older = update(engines.engines).where(engines.engines.c.url == A).values(url="http://HOST:8000/v1")
        both.write(lambda connection: connection.execute(older) and None)
        assert write(both, engines.drain, "http://HOST:8000/v1")
        assert write(both, engines.remove, "http://HOST:8000/v1")
        assert list(listed(both)) == [B]

    def test_a_usual_port_and_an_address_in_brackets_are_written_alike_too(self) -> None:
        assert engines.normal_url("https://Api.example:443") == engines.normal_url("https://api.example/v1")
        assert engines.normal_url("http://api.example:443") == "http://api.example:443/v1"
        assert engines.normal_url("http://[::1]:8000/") == "http://[::1]:8000/v1"
        assert engines.normal_url("http://a/Path/v1?x=1") == "http://a/Path/v1"

    @pytest.mark.parametrize("written", ["", "a:8000", "ftp://a/v1", "http:///v1", "http://a:port/v1", "http://[::1"])
    def test_what_is_no_address_is_refused(self, store: Store, written: str) -> None:
        with pytest.raises(InvalidRequest, match="url"):
            write(store, engines.add, Engine(written, "m"))

    def test_a_key_is_shown_nowhere(self, store: Store) -> None:
        write(store, engines.add, Engine(A, "m", "secret"))
        assert listed(store)[A].key == "secret"
        assert "secret" not in repr(listed(store))

    def test_a_password_in_an_address_is_refused_and_not_shown(self, store: Store) -> None:
        with pytest.raises(InvalidRequest, match="password") as caught:
            write(store, engines.add, Engine("http://me:secret@a/v1", "m"))
        assert "secret" not in str(caught.value)

    @pytest.mark.parametrize("key", ["secret\nsecret", "sécret", "se cret", "secret" * 100])
    def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(self, store: Store, key: str) -> None:
        with pytest.raises(InvalidRequest, match="API key") as caught:
            write(store, engines.add, Engine(A, "m", key))
        assert "cret" not in str(caught.value)

    def test_a_node_takes_its_own_along_but_what_it_still_brings(self, both: Store) -> None:
        write(both, engines.add, Engine("http://n1/v1", added_by="n"))
        write(both, engines.add, Engine("http://n2/v1", added_by="n"))
        write(both, engines.remove_of, "n", "http://n2/v1")
        assert list(listed(both)) == [A, B, "http://n2/v1"]
        write(both, engines.remove_of, "n")
        assert list(listed(both)) == [A, B]

    def test_what_others_use_too_stays_when_a_node_ends(self, both: Store) -> None:
        for node in ("n1", "n2"):
            write(both, engines.add, Engine("http://n/v1", added_by=node))
            write(both, engines.add, Engine(A, added_by=node))
        write(both, engines.add, Engine("http://own/v1", added_by="n2"))
        write(both, engines.add, Engine("http://own/v1", added_by="n2"))
        write(both, engines.remove_of, "n2")
        assert list(listed(both)) == [A, B, "http://n/v1"]

    def test_a_draining_one_stays_listed(self, both: Store) -> None:
        assert write(both, engines.drain, B)
        assert not write(both, engines.drain, "http://c/v1")
        assert {url: engine.state for url, engine in listed(both).items()} == {A: "active", B: "draining"}

    def test_what_is_found_out_comes_back(self, both: Store) -> None:
        write(both, engines.set_failure, A, "x" * 5000)
        assert len(listed(both)[A].failure) == 1000
        write(both, engines.set_info, A, INFO)
        assert (listed(both)[A].info, listed(both)[A].failure, listed(both)[B].info) == (INFO, "", None)


class TestOrders:
    def test_a_pause_is_one_order_however_often_it_is_given(self, both: Store) -> None:
        for _ in range(2):
            write(both, engines.set_paused, "drain", "me", None)
        engine = listed(both)[A]
        assert (engine.paused, engine.paused_by, engine.n_orders, engine.n_done) == ("drain", "me", 1, 0)
        assert 0 <= engine.paused_s < 60
        write(both, engines.set_paused, "abort", "you", [A])
        assert [(each.paused, each.n_orders) for each in listed(both).values()] == [("abort", 2), ("drain", 1)]
        write(both, engines.set_paused, "", "", None)
        write(both, engines.set_paused, "", "", None)
        assert [(each.paused, each.paused_by, each.n_orders) for each in listed(both).values()] == [
            ("", "", 3),
            ("", "", 2),
        ]

    def test_what_was_done_before_it_was_added_anew_counts_for_nothing(self, both: Store) -> None:
        write(both, engines.set_paused, "drain", "me", None)
        write(both, engines.set_version, "7", None)
        write(both, engines.clear)
        write(both, engines.add, Engine(A))
        # of a worker that has not heard of it
        write(both, engines.carried_out, A, 2, "drain", "7")
        engine = listed(both)[A]
        assert (engine.n_orders, engine.n_done, engine.engine_paused, engine.engine_version) == (0, 0, "", "")

    def test_another_mode_does_not_hide_how_long_it_lasts(self, both: Store) -> None:
        def first_paused() -> float:
            found = both.read(lambda connection: connection.execute(text("SELECT paused_at FROM engines")).scalars())
            return float(max(found))

        write(both, engines.set_paused, "drain", "me", None)
        before = first_paused()
        write(both, engines.set_paused, "abort", "me", None)
        assert first_paused() == before

    def test_an_order_is_done_once_it_was_carried_out_and_an_older_one_undoes_nothing(self, both: Store) -> None:
        write(both, engines.set_paused, "keep", "me", None)
        write(both, engines.set_version, "7", None)
        write(both, engines.carried_out, A, 2, "keep", "7")
        write(both, engines.carried_out, A, 1, "keep", "")
        engine = listed(both)[A]
        assert (engine.n_orders, engine.n_done, engine.engine_paused, engine.engine_version) == (2, 2, "keep", "7")
        assert listed(both)[B].n_done == 0

    def test_weights_are_named_again_only_to_those_that_missed_it(self, both: Store) -> None:
        write(both, engines.set_version, "7", None)
        write(both, engines.carried_out, A, 1, "", "7")
        write(both, engines.carried_out, B, 1, "", "")
        write(both, engines.set_version, "7", None)
        assert [each.n_orders for each in listed(both).values()] == [1, 2]


class TestUsers:
    def test_the_reports_of_those_that_live_are_found(self, both: Store) -> None:
        write(both, engines.report, "w1", {A: Use(1, 2, 300)})
        write(both, engines.report, "w2", {})
        write(both, engines.report, "w1", {A: Use(2, 1, 100), B: Use(0)})
        both_live = {"w1": {A: Use(2, 1, 100), B: Use(0, 0, 0)}, "w2": {}}
        assert both.read(lambda connection: engines.uses(connection, 60.0)) == both_live
        assert both.read(lambda connection: engines.uses(connection, -60.0)) == {}
        write(both, engines.forget_user, "w1")
        assert both.read(lambda connection: engines.uses(connection, 60.0)) == {"w2": {}}
        write(both, engines.forget_users, -60.0)
        assert both.read(lambda connection: engines.uses(connection, 60.0)) == {}


def test_engines_of_before_are_usable_after_the_migration(store_url: str) -> None:
    old = "INSERT INTO engines (url, model, key, state, added_by, added_at) VALUES (:url, 'm', 'k', 'active', '', 1.0)"
    store = Store(store_url)
    try:
        migrations.migrate(store, "0003")
        store.write(lambda connection: connection.execute(text(old), {"url": A}) and None)
        migrations.migrate(store)
        assert list(listed(store).values()) == [Engine(A, "m", "k")]
        migrations.migrate(store, "0003")
        migrations.migrate(store)
        assert list(listed(store)) == [A]
    finally:
        store.close()
