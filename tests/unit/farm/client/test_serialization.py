"""Values are read as they were written, or refused: the server may not be a farm's API."""

from __future__ import annotations

from typing import Any

import pytest

from farm.client import serialization
from farm.client.consumer_stream import Page
from farm.records.engine_state import StoredEngine
from farm.records.rollout import BatchStatus, Reward, Stage, State

REWARD = Reward(0.1, {"why": ["\ud800", 2**70]}, "test", 1 / 3)
STATUS = BatchStatus("b", 1, 1, 0, 0, {Stage.RUN: {State.ACTIVE: 1}}, {"lost": 2}, None, 0.0, findings=("one",))


@pytest.mark.parametrize("value", [REWARD, STATUS, Page((), True), StoredEngine("http://e/v1")])
def test_values_are_read_as_they_were_written(value: Any) -> None:
    assert serialization.read(type(value), serialization.written(value)) == value


def test_unknown_fields_of_a_newer_farm_are_ignored() -> None:
    assert serialization.read(Page, b'{"rollouts": [], "is_last": true, "mood": 1}') == Page((), True)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (Reward, b"<html>"),
        (Reward, b"\xff"),
        (Reward, b"[" * 10**6),
        (Reward, b"[]"),
        (Reward, b'{"value": 1}'),
        (Page, b'{"rollouts": [{}], "is_last": true}'),
        (BatchStatus, serialization.written(STATUS).replace(b'"run"', b'"walk"')),
        (dict, b"3"),
        (str, b"null"),
    ],
)
def test_malformed_values_are_refused(kind: type[Any], data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever it says
        serialization.read(kind, data)


@pytest.mark.parametrize("value", [object(), {1: {2}}, type])
def test_values_that_json_cannot_hold_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="not JSON-serializable"):
        serialization.written(value)
