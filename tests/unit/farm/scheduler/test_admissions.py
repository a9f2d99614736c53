"""The order of placement: rollouts that fit on no node do not block those that fit."""

from __future__ import annotations

from collections import Counter

import pytest

from farm.records.node import Node
from farm.records.request import BatchRequest, Instance, Limits
from farm.scheduler.admissions import Admissions
from farm.store import batches
from farm.store.database import Store
from tests.secret_keys import key_of

ENDS_SOON = Node("short", 8, 2, 4, 2, ["noop"], {"job_left_s": 3600.0}, up_s=3000.0)
ENDLESS = Node("long", 9, 3, 3, 3, ["noop"], {})


def submit(store: Store, n: int, run_s: float, priority: int = 0) -> str:
    request = BatchRequest(
        instances=(Instance(data_source="noop", fields={}),) * n,
        limits=Limits(init_s=1, run_s=run_s, eval_s=1),
        priority=priority,
    )
    return store.write(lambda connection: batches.create(connection, request, f"{n} {run_s}", key_of(store)))[0]


def placed(store: Store, admissions: Admissions, *up: Node) -> Counter[tuple[str, str]]:
    """Return how many rollouts of each batch are placed on each node."""
    room = {node.node: node.room for node in up}
    chosen, _ = store.read(lambda connection: admissions.choose(connection, up, room, ()))
    return Counter(
        (each.stage_of_attempt[0].partition(".")[0], each.node) for each in chosen if each.stage_of_attempt is not None
    )


@pytest.mark.parametrize("priority", [0, 5])
def test_fitting_rollouts_take_the_slots_of_unfitting_ones(sqlite_store: Store, priority: int) -> None:
    quick, long = submit(sqlite_store, 20, 10.0), submit(sqlite_store, 20, 1000.0, priority)
    admissions = Admissions()
    for _ in range(2):
        assert placed(sqlite_store, admissions, ENDS_SOON) == {(quick, "short"): 8}
    n_placed = placed(sqlite_store, admissions, ENDS_SOON, ENDLESS)
    assert n_placed.total() == 17, "no slot is left empty"
    assert n_placed[long, "short"] == 0
    assert n_placed[long, "long"] >= 8, "rollouts that fit only there are not displaced by those that fit anywhere"


def test_higher_priority_goes_first_without_job_time_limits(sqlite_store: Store) -> None:
    long, _ = submit(sqlite_store, 20, 1000.0, priority=5), submit(sqlite_store, 20, 10.0)
    assert placed(sqlite_store, Admissions(), ENDLESS) == {(long, "long"): 9}
