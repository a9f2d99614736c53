"""Annotations of trainers about rollouts: on every kind of database, by the store and over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

import farm
from farm.callers import Caller, Scope, acting_for
from farm.client.exports.parquet_writer import parquet_parts
from farm.client.exports.rollout_export import exported
from farm.client.exports.rollout_line import written
from farm.client.farm import Farm
from farm.client.remote import RemoteFarm
from farm.errors import Conflict, Forbidden, InvalidRequest, NotFound
from farm.store.database import Store
from farm.store.reports.rollout_table import RolloutFilter
from farm.store.retention.kept import RetentionLevel
from tests.contract.retention.test_pruning import ended_batch, farm_of, pruned
from tests.contract.store.test_store import new_batch, place
from tests.services.api import KEY, served

TOKENS = np.array([np.nan], np.float32)


@pytest.fixture(params=["store", "HTTP"])
def client(request: pytest.FixtureRequest, store: Store) -> Iterator[Farm]:
    if request.param == "store":
        yield farm_of(store)
        return
    with served(farm_of(store)) as url, RemoteFarm(url, KEY) as remote:
        yield remote


def new_annotations(rollout_id: str) -> list[dict[str, Any]]:
    return [
        {"rollout_id": rollout_id, "name": "advantage", "value": -0.5},
        {"rollout_id": rollout_id, "name": "loss", "row": 0, "value": 1.25},
        {"rollout_id": rollout_id, "name": "loss", "row": 0, "tokens": TOKENS} | {"name": "by token"},
    ]


def test_annotations_are_stored_once_and_read_back_unchanged(store: Store, client: Farm) -> None:
    one, other = f"{ended_batch(store)}.0.0", f"{ended_batch(store)}.1.0"
    assert (
        client.annotate("trainer", 7, [*new_annotations(one), {"rollout_id": other, "name": "advantage", "value": 1}])
        == 4
    )
    found = client.annotations.of(one)
    assert [(each.name, each.producer, each.step, each.value, each.row) for each in found] == [
        ("advantage", "trainer", 7, -0.5, None),
        ("by token", "trainer", 7, None, 0),
        ("loss", "trainer", 7, 1.25, 0),
    ]
    assert found[1].tokens is not None
    assert found[1].tokens.dtype == np.float32
    assert np.array_equal(found[1].tokens, TOKENS, equal_nan=True)
    assert client.annotate("trainer", 7, new_annotations(one)) == 0
    assert client.annotate("trainer", 8, new_annotations(one)[:1]) == 1
    assert client.annotate("another", 7, new_annotations(one)[:1]) == 1
    assert len(client.annotations.of(one)) == 5
    [last] = client.annotations.of(other)
    assert last.value == 1.0
    assert last.created_at > 0


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"value": 0.25}, Conflict, "trainer has already written advantage .* for step 7 with another value"),
        ({"rollout_id": "b0123456789.0.0"}, NotFound, "b0123456789"),
        ({"rollout_id": "no"}, NotFound, "no"),
        ({"row": 4}, InvalidRequest, "has no training row 4"),
        ({"row": -1}, InvalidRequest, "greater than or equal to 0"),
        (
            {"value": None, "tokens": [1.0, 2.0], "row": 0},
            InvalidRequest,
            "has 2 numbers, but the response of .* 1 to",
        ),
        ({"value": None, "tokens": [1.0]}, InvalidRequest, "need a `row`"),
        ({"value": None, "tokens": "none", "row": 0}, InvalidRequest, "packed array|base64|Incorrect padding"),
        ({"value": None, "tokens": [["x"]], "row": 0}, InvalidRequest, "must be a list of numbers"),
        ({"value": None, "tokens": [10**400], "row": 0}, InvalidRequest, "list of numbers|between -9"),
        ({"value": None, "tokens": [1e39], "row": 0}, InvalidRequest, "numbers in the range of float32"),
        ({"value": None, "tokens": [[1.0]], "row": 0}, InvalidRequest, "must have one dimension"),
        ({"value": None}, InvalidRequest, "needs either a `value` or `tokens`"),
        ({"value": float("inf")}, InvalidRequest, "must be finite"),
        ({"name": ""}, InvalidRequest, "at least 1"),
        ({"name": "x" * 65}, InvalidRequest, "at most 64"),
        ({"weight": 1}, InvalidRequest, "not permitted"),
    ],
)
def test_invalid_annotation_is_refused_with_its_whole_request(
    store: Store, client: Farm, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    rollout_id = f"{ended_batch(store)}.0.0"
    client.annotate("trainer", 7, new_annotations(rollout_id)[:1])
    wrong = {name: value for name, value in (new_annotations(rollout_id)[0] | change).items() if value is not None}
    with pytest.raises(error, match=words):
        client.annotate("trainer", 7, [*new_annotations(rollout_id)[1:], wrong])
    assert [each.name for each in client.annotations.of(rollout_id)] == ["advantage"]


def test_annotation_of_a_queued_rollout_or_a_duplicate_is_refused(store: Store, client: Farm) -> None:
    batch_id = new_batch(store, 1, 1)
    place(store, batch_id)
    with pytest.raises(InvalidRequest, match="is queued: annotate it once it is completed"):
        client.annotate("trainer", 0, new_annotations(f"{batch_id}.0.0")[:1])
    rollout_id = f"{ended_batch(store)}.0.0"
    with pytest.raises(InvalidRequest, match=r"annotations\[1\]\.name.* twice"):
        client.annotate("trainer", 0, new_annotations(rollout_id)[:1] * 2)
    for producer, step in (("", 0), ("trainer", -1)):
        with pytest.raises(InvalidRequest):
            client.annotate(producer, step, new_annotations(rollout_id))
    with pytest.raises(NotFound):
        client.annotations.of("b0123456789.0.0")


def test_submitter_annotates_only_its_own_rollouts(store: Store) -> None:
    rollout_id = f"{ended_batch(store)}.0.0"
    local = farm_of(store)
    with acting_for(Caller("somebody", (Scope.SUBMIT,))), pytest.raises(Forbidden, match="may only change its own"):
        local.annotate("trainer", 0, new_annotations(rollout_id))
    with acting_for(Caller("head", (Scope.OPERATE,))):
        assert local.annotate("trainer", 0, new_annotations(rollout_id)) == 3


def test_annotation_with_a_list_of_numbers_works_over_plain_http(store: Store) -> None:
    rollout_id = f"{ended_batch(store)}.0.0"
    with served(farm_of(store)) as url, httpx2.Client(base_url=url, headers={"x-api-key": KEY}) as http:
        new = {"rollout_id": rollout_id, "name": "kl", "row": 0, "tokens": [0.5]}
        body = {"producer": "curl", "step": 1, "annotations": [new]}
        assert http.post("/v1/annotations", json=body).json() == 1
        [found] = http.get(f"/v1/rollouts/{rollout_id}/annotations").json()
    assert (found["name"], found["value"], found["row"]) == ("kl", None, 0)


def test_exports_contain_annotations(store: Store, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow.parquet")
    batch_id = ended_batch(store)
    local = farm_of(store)
    local.annotate("trainer", 7, new_annotations(f"{batch_id}.0.0"))
    values = sorted(exported(local, batch_id, RolloutFilter()), key=lambda each: str(each["rollout_id"]))
    line = json.loads(written(values[0]))
    assert [(each["name"], each["value"], each["tokens"]) for each in line["annotations"]] == [
        *(("advantage", -0.5, None), ("by token", None, [None]), ("loss", 1.25, None)),
    ]
    assert json.loads(written(values[1]))["annotations"] == []
    (tmp_path / "rows.parquet").write_bytes(b"".join(parquet_parts(iter(values))))
    row, _ = pyarrow.read_table(tmp_path / "rows.parquet").to_pylist()
    assert [(each["name"], each["step"], each["row"]) for each in row["annotations"]] == [
        *(("advantage", 7, None), ("by token", 7, 0), ("loss", 7, 0)),
    ]


@pytest.mark.parametrize(
    ("kept", "left"),
    [(RetentionLevel.TRAJECTORIES, 3), (RetentionLevel.REWARDS, 2), (RetentionLevel.NOTHING, None)],
)
def test_pruning_keeps_annotations_of_the_kept_level(store: Store, kept: RetentionLevel, left: int | None) -> None:
    batch_id = ended_batch(store)
    local = farm_of(store)
    local.annotate("trainer", 7, new_annotations(f"{batch_id}.0.0"))
    assert pruned(store, kept) == [batch_id]
    if left is None:
        with pytest.raises(NotFound):
            local.annotations.of(f"{batch_id}.0.0")
    else:
        assert len(local.annotations.of(f"{batch_id}.0.0")) == left


def test_annotation_records_are_public() -> None:
    assert farm.NewAnnotation(rollout_id="b0123456789.0.0", name="loss", value=1.0).value == 1.0
    assert farm.Annotation("b0123456789.0.0", "loss", "trainer", 1, 1.0).tokens is None
