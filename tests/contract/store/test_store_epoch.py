"""A store that went back in time is detected, and so is a second node of the same name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import delete, update

from farm.client.local import _MAX_SEEN, LocalFarm
from farm.errors import Conflict, NotFound, StoreWentBack
from farm.notifications import Signals
from farm.records.node import UP, Node
from farm.store import epoch, node_names, nodes
from farm.store.database import Store
from farm.store.rollouts import batches, rollouts
from farm.store.sql.clock import db_now
from tests.contract.store.test_store import new_batch, place, run_to_end
from tests.services.farms import NOOP


def count_on(store: Store, memory: epoch.EpochTracker) -> epoch.Epoch:
    """Raise the counter, as the leading dispatcher does."""
    store.write(lambda connection: epoch.advance(connection, memory.last))
    result = store.read(epoch.current)
    memory.note(result)
    return result


def restore(store: Store, to: epoch.Epoch) -> None:
    back = update(epoch.epochs).values(epoch=to.epoch, counter=to.counter)
    store.write(lambda connection: connection.execute(back) and None)


class TestEpoch:
    def test_counter_increases_without_an_alarm(self, store: Store, caplog: pytest.LogCaptureFixture) -> None:
        one, other = epoch.EpochTracker(), epoch.EpochTracker()
        result = [count_on(store, memory) for memory in (one, other, one, one, other)]
        assert [each.counter for each in result] == [1, 2, 3, 4, 5]
        assert len({each.epoch for each in result}) == 1
        assert caplog.text == ""

    def test_rollback_is_reported_by_all_and_starts_one_new_epoch(
        self, store: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        batch_id, done = new_batch(store, 2), new_batch(store)
        for each in (batch_id, done):
            place(store, each)
            run_to_end(store, f"{each}.0.0")
        backup = store.read(epoch.current)
        leader, standby, new = epoch.EpochTracker(), epoch.EpochTracker(), epoch.EpochTracker()
        for memory in (leader, leader, standby, leader):
            seen = count_on(store, memory)
        restore(store, backup)
        standby.note(store.read(epoch.current))
        assert caplog.text.count("ALARM") == 1
        result = count_on(store, leader)
        assert result.epoch != backup.epoch
        assert result.counter > seen.counter
        assert count_on(store, leader).epoch == count_on(store, standby).epoch == count_on(store, new).epoch
        assert caplog.text.count("ALARM") == 3
        last = _last_seqs(store)
        # rollouts that end from now on have numbers that no stream has passed
        assert last[batch_id] > 1000
        assert last[done] == 1
        run_to_end(store, f"{batch_id}.1.0")
        (ended,) = LocalFarm(store, Signals(""), 10).page(batch_id, 500).rollouts
        assert ended.rollout_id == f"{batch_id}.1.0"

    def test_epoch_of_another_store_is_reported(self, store: Store, caplog: pytest.LogCaptureFixture) -> None:
        memory = epoch.EpochTracker()
        count_on(store, memory)
        restore(store, epoch.Epoch("another", 99))
        memory.note(store.read(epoch.current))
        assert "ALARM the store went back in time" in caplog.text


def _last_seqs(store: Store) -> dict[str, int]:
    return {row.batch_id: row.last_seq for row in store.read(lambda c: c.execute(batches.select()).all())}


class TestClientEpoch:
    def test_lost_batch_is_reported_as_a_store_rollback(self, store: Store) -> None:
        service = LocalFarm(store, Signals(""), 100)
        batch_id = service.submit({"instances": [NOOP]})
        store.write(lambda c: c.execute(delete(batches).where(batches.c.batch_id == batch_id)) and None)
        asks: list[Callable[[], Any]] = [
            lambda: service.status(batch_id),
            lambda: service.page(batch_id, 0),
            lambda: service.has_open(batch_id),
            lambda: list(service.stream(batch_id)),
        ]
        for ask in asks:
            with pytest.raises(StoreWentBack, match=f"{batch_id} existed"):
                ask()
        with pytest.raises(NotFound):
            service.status("b0123456789")

    def test_cursor_beyond_the_store_is_reported_as_a_rollback(
        self, store: Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        service = LocalFarm(store, Signals(""), 100)
        batch_id = service.submit({"instances": [NOOP], "n_samples": 3})
        place(store, batch_id)
        for sample in range(2):
            run_to_end(store, f"{batch_id}.0.{sample}")
        cursor = service.page(batch_id, 0).rollouts[-1].cursor
        assert service.page(batch_id, cursor).rollouts == ()
        again = {"state": "queued", "stage": "init", "finish_seq": None, "finished_at": None, "outcome": None}
        store.write(lambda c: c.execute(update(rollouts).values(reward=None, **again)) and None)
        store.write(lambda c: c.execute(update(batches).values(last_seq=0)) and None)
        with pytest.raises(StoreWentBack, match="no cursor beyond 0, and 2 was given"):
            service.page(batch_id, cursor)
        with pytest.raises(StoreWentBack):
            next(service.stream(batch_id, cursor=cursor))
        assert "ALARM" in caplog.text


def node(name: str = "a", instance: str = "one", **process: Any) -> Node:
    info = {"process": node_names.this_process() | process}
    return Node(name, 8, 4, 4, 4, ["noop"], info, instance=instance)


ELSEWHERE = {"boot": "of another machine"}


class TestNodeName:
    def test_name_is_taken_released_and_taken_again(self, store: Store) -> None:
        first = node()
        node_names.take(store, first, 60.0)
        node_names.take(store, first, 60.0)
        (result,) = store.read(nodes.listing)
        assert (result.state, result.room, result.instance) == (node_names.STARTING, 0, "one")
        store.write(lambda c: nodes.announce(c, first))
        assert store.read(nodes.listing)[0].state == UP
        store.write(lambda c: nodes.remove(c, "a"))
        node_names.take(store, node(instance="two"), 60.0)

    @pytest.mark.parametrize("where", [{}, ELSEWHERE], ids=["here", "elsewhere"])
    def test_name_of_a_live_node_is_refused(self, store: Store, where: dict[str, Any]) -> None:
        first = node(**where)
        store.write(lambda c: nodes.announce(c, first))
        silent = update(nodes.nodes).values(heartbeat_at=db_now() - 30.0)
        store.write(lambda c: c.execute(silent) and None)
        beats: list[str] = []

        class Beating(Store):
            def write(self, work: Any, **options: Any) -> Any:
                result = super().write(work, **options)
                if not beats:
                    beats.append(super().write(lambda c: nodes.heartbeat(c, first), urgent=True))
                return result

        second = Beating(store.url)
        with pytest.raises(Conflict, match="FARM_NODE"):
            node_names.take(second, node(instance="two"), 60.0)
        second.close()
        with pytest.raises(Conflict):
            store.write(lambda c: nodes.announce(c, node(instance="two")))
        assert store.write(lambda c: nodes.heartbeat(c, first))
        assert not store.read(lambda c: node_names.has(c, node(instance="two")))

    def test_name_of_a_long_silent_node_is_free(self, store: Store) -> None:
        first = node(**ELSEWHERE)
        store.write(lambda c: nodes.announce(c, first))
        node_names.take(store, node(instance="two"), 0.5)
        assert store.read(lambda c: node_names.has(c, node(instance="two")))
        # and when it wakes up, it gets an error
        with pytest.raises(Conflict):
            store.write(lambda c: nodes.heartbeat(c, first))
        assert not store.read(lambda c: node_names.has(c, first))

    def test_name_of_an_ended_local_process_is_free_at_once(self, store: Store) -> None:
        program = "import json; from farm.store import node_names; print(json.dumps(node_names.this_process()))"
        made = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
        dead = json.loads(made.stdout)
        assert node_names.is_gone(dead)
        assert not node_names.is_gone(node_names.this_process())
        assert node_names.is_gone(node_names.this_process() | {"began": "1"}), "its number is another's now"
        unknown: list[Any] = [None, {}, [], dead | ELSEWHERE, dead | {"pids": "pid:[1]"}]
        for each in unknown:
            assert not node_names.is_gone(each)
        store.write(lambda c: nodes.announce(c, replace(node(), info={"process": dead})))
        node_names.take(store, node(instance="two"), 600.0)
        assert node_names.this_process()["pid"] == os.getpid()

    def test_name_goes_to_one_of_concurrent_nodes(self, store: Store) -> None:
        named = [node(instance=str(n)) for n in range(2)]
        for each in named:
            store.write(lambda c, each=each: node_names._taken(c, each, 60.0))  # type: ignore[misc]
        assert [store.read(lambda c, each=each: node_names.has(c, each)) for each in named] == [True, False]  # type: ignore[misc]


def test_client_remembers_only_its_newest_batches(sqlite_store: Store) -> None:
    service = LocalFarm(sqlite_store, Signals(""), 100)
    for number in range(5 * _MAX_SEEN):
        service._saw(f"b{number}", number)
    assert _MAX_SEEN <= len(service._seen) <= 2 * _MAX_SEEN
    assert service._seen[f"b{5 * _MAX_SEEN - 1}"] == 5 * _MAX_SEEN - 1
