"""The first stage of a rollout: run, if its kind is known to need no sandbox and its agent needs none either."""

from __future__ import annotations

from typing import Any

import pytest

from farm.records.node import Node
from farm.records.request import BatchRequest, Instance
from farm.records.rollout import Stage
from farm.scheduler.admissions import Admissions, FirstStages
from farm.store import batches
from farm.store.database import Store
from farm.store.placement import QueuedStage
from tests.secret_keys import key_of


def node(name: str, reported: Any) -> Node:
    return Node(name, 4, 1, 2, 1, ["empty", "noop"], {"without_sandbox": reported})


def submit(store: Store, agent: str = "", *sources: str) -> str:
    instances = tuple(Instance(data_source=source, fields={}) for source in sources or ("empty",))
    request = BatchRequest(instances=instances, agent=agent)
    return store.write(lambda connection: batches.create(connection, request, agent, key_of(store)))[0]


def test_first_stage_depends_on_the_node_and_the_kind(sqlite_store: Store) -> None:
    batch_id = submit(sqlite_store, "", "empty", "noop")
    admissions, up = Admissions(), [node("knows", ["empty"]), node("new", [])]
    room = {"knows": 2, "new": 2}
    chosen, _ = sqlite_store.read(lambda connection: admissions.choose(connection, up, room, ()))
    stages = {each.stage_of_attempt[0]: each.stage_of_attempt[2] for each in chosen if each.stage_of_attempt}
    nodes = {each.stage_of_attempt[0]: each.node for each in chosen if each.stage_of_attempt}
    first, other = f"{batch_id}.0.0", f"{batch_id}.1.0"
    assert stages == {first: Stage.RUN if nodes[first] == "knows" else Stage.INIT, other: Stage.INIT}
    room = {"knows": 2}
    chosen, _ = sqlite_store.read(lambda connection: admissions.choose(connection, up[:1], room, ()))
    assert [each.stage_of_attempt and each.stage_of_attempt[2] for each in chosen] == [Stage.RUN, Stage.INIT]


@pytest.mark.parametrize(
    ("agent", "queued", "stage"),
    [
        ("", QueuedStage("r", 1, Stage.INIT, "empty"), Stage.RUN),
        ("noop", QueuedStage("r", 1, Stage.INIT, "empty"), Stage.INIT),
        ("", QueuedStage("r", 2, Stage.INIT, "empty"), Stage.INIT),
        ("", QueuedStage("r", 2, Stage.EVAL, "empty"), Stage.EVAL),
        ("", QueuedStage("r", 1, Stage.INIT, "noop"), Stage.INIT),
    ],
)
def test_possible_sandbox_or_earlier_attempt_starts_with_init(
    sqlite_store: Store, agent: str, queued: QueuedStage, stage: Stage
) -> None:
    first, batch_id = FirstStages(), submit(sqlite_store, agent)
    first.note([node("n", ["empty"])])
    assert sqlite_store.read(lambda connection: first.of(connection, batch_id, queued, "n")) is stage


@pytest.mark.parametrize("reported", [None, "empty", {"empty": 1}, [1, None, ["empty"]], 7])
def test_garbage_in_node_information_is_ignored(reported: Any) -> None:
    assert not node("n", reported).without_sandbox & {"empty"}
