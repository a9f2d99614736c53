"""Reasons why a batch waits, by one rule; parts count as ready only after they have worked once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from farm.cli.readiness import engine_trouble, missing_parts, takes_rollouts
from farm.records.engine import EngineInfo
from farm.records.engine_state import EngineState, StoredEngine
from farm.records.node import BROKEN, DRAINING, Node

NODE = Node("n1", 8, 1, 4, 1, [], {})
KNOWN = StoredEngine("http://a/v1", info=EngineInfo(model="m"))
_LACKS = (
    "lacks version 18 of the weights ({}) and gets no calls; push them and name them with set_version, or let the farm "
    "do it with weight_update(..., path=...) or serve_weights"
)
TROUBLED: dict[str, tuple[StoredEngine, str]] = {
    "not probed yet": (StoredEngine("http://a/v1"), "has not answered any node yet"),
    "it is out": (replace(KNOWN, failure="does not answer"), "does not answer"),
    "its pause was forgotten": (
        replace(KNOWN, paused="drain", paused_by="h/7", paused_s=301.0),
        "has been paused for 301 s by h/7",
    ),
    "it has older weights": (
        replace(KNOWN, version="18", engine_version="17"),
        _LACKS.format("it has '17'"),
    ),
    "it has other weights": (replace(KNOWN, version="18"), _LACKS.format("it reports no version")),
}
WELL: dict[str, StoredEngine] = {
    "probed": KNOWN,
    "it has the weights": replace(KNOWN, version="18", engine_version="18"),
    "it is being given new ones": replace(KNOWN, version="18", engine_version="17", paused="drain", paused_s=20.0),
}


@pytest.mark.parametrize(("engine", "why"), TROUBLED.values(), ids=TROUBLED)
def test_engine_without_a_successful_call_has_a_reported_trouble(engine: StoredEngine, why: str) -> None:
    assert engine_trouble(engine) == why


@pytest.mark.parametrize("engine", WELL.values(), ids=WELL)
def test_working_engine_has_no_trouble(engine: StoredEngine) -> None:
    assert engine_trouble(engine) == ""
    assert missing_parts([NODE], [EngineState(engine, 0, 0)]) == []


@pytest.mark.parametrize(
    ("node", "takes"),
    [
        (NODE, True),
        (replace(NODE, heartbeat_age_s=1e6), False),
        (replace(NODE, state=DRAINING), False),
        (replace(NODE, state=BROKEN), False),
        (replace(NODE, out_of_service_s=20.0, out_of_service_why="run: x", n_trips=1), True),
    ],
)
def test_node_takes_rollouts_while_it_is_alive_and_not_leaving(node: Node, takes: bool) -> None:
    assert takes_rollouts(node) is takes
    assert (missing_parts([node], [EngineState(KNOWN, 0, 0)]) == []) is takes


def test_missing_parts_are_listed_with_remedies() -> None:
    assert missing_parts([], []) == [
        "no node runs: nothing runs until `farm up` or `farm node` is started",
        "no engine is added: rollouts with model calls wait until `farm engines add http://HOST:PORT/v1`",
    ]
    silent = replace(NODE, heartbeat_age_s=1e6)
    assert missing_parts([silent, replace(silent, node="n2", heartbeat_age_s=2e6)], [EngineState(KNOWN, 0, 0)]) == [
        "no node runs (n1 sent no heartbeat for 1000000 s): nothing runs until `farm up` or `farm node` is started"
    ]
    out = EngineState(TROUBLED["it is out"][0], 0, 0)
    draining = EngineState(replace(KNOWN, state="draining"), 0, 0)
    assert missing_parts([NODE], [out, draining]) == [
        "no engine can be used: http://a/v1 does not answer; see `farm engines list`"
    ]
    assert missing_parts([NODE], [draining, out]) == [
        "no engine can be used: http://a/v1 is draining; see `farm engines list`"
    ]
    assert missing_parts([NODE], [out, EngineState(KNOWN, 0, 0)]) == []


def test_engine_that_was_just_added_is_not_missing() -> None:
    assert missing_parts([NODE], [EngineState(StoredEngine("http://a/v1"), 0, 0)]) == []
