"""Exports in each format: the same rollouts with all training data, limited by the filter, in bounded memory."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet

from farm.cli.upkeep.export_rollouts import export
from farm.client.exports import parquet_writer
from farm.client.exports.parquet_writer import write_dataset
from farm.client.exports.rollout_export import PAGE
from farm.client.exports.rollout_line import written
from farm.store.database import Store
from tests.contract.retention.test_pruning import ended_batch, pruned
from tests.contract.store.test_store import announce
from tests.services.commands import output_of

ARRAYS = ("prompt_ids", "response_ids", "response_mask", "response_logprobs")


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of an export in any format."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    rows: list[dict[str, Any]] = parquet.read_table(path / "data" if path.is_dir() else path).to_pylist()
    return rows


def essence(row: dict[str, Any]) -> Any:
    """Return the training data and the messages of a row."""
    messages = [(message["role"], message.get("content")) for message in row["messages"]]
    rows = [[segment[name] for name in ARRAYS] for segment in row["segments"]]
    return row["rollout_id"], row["outcome"], row["reward"], row["trainable"], row["versions"], messages, rows


def versioned(row: dict[str, Any]) -> dict[str, Any]:
    return {"versions": [row.get("version_min"), row.get("version_max")], **row}


@pytest.fixture
def batch_ids(sqlite_store: Store) -> list[str]:
    announce(sqlite_store)
    # more than one page
    return [ended_batch(sqlite_store, n=n, n_samples=2, age_s=0.0) for n in (PAGE // 2 + 1, 1)]


def test_all_formats_hold_the_same_rollouts(sqlite_store: Store, batch_ids: list[str], tmp_path: Path) -> None:
    outputs = [tmp_path / name for name in ("rows.jsonl", "rows.parquet", "rows")]
    for output in outputs:
        words = output_of(export, *batch_ids, str(output), "--url", sqlite_store.url)
        assert words == f"{PAGE + 4} rollouts of 2 batches written to {output}\n"
    found = [[essence(versioned(row)) for row in read(output)] for output in outputs]
    assert found[0] == found[1] == found[2]
    assert len({each[0] for each in found[0]}) == PAGE + 4
    _, _, reward, trainable, _, messages, rows = found[0][0]
    assert (reward, trainable, rows) == (0.5, True, [[[1, 2], [3], [1], [0.0]]])
    assert messages
    (score,) = json.loads(read(outputs[1])[0]["scores"])
    assert score["value"] == 0.5
    assert (outputs[2] / "README.md").read_text().startswith("---\nconfigs:\n")
    assert sorted(each.name for each in tmp_path.glob("*rows*")) == ["rows", "rows.jsonl", "rows.parquet"]


def test_filters_apply_to_all_batches(sqlite_store: Store, batch_ids: list[str], tmp_path: Path) -> None:
    here = ("--url", sqlite_store.url)
    output = tmp_path / "some"
    words = output_of(export, str(output), "--format", "jsonl", "--filter", "group=0", *here)
    assert words.startswith("4 rollouts of 2 batches")
    words = output_of(export, batch_ids[1], str(output), "--format", "jsonl", "--filter", "min_reward=0.75", *here)
    assert words.startswith("0 rollouts of 1 batches")
    assert read(output.with_suffix("")) == [] if output.is_dir() else output.read_bytes() == b""
    old = ended_batch(sqlite_store, n=1)
    assert pruned(sqlite_store) == [old]
    assert "was pruned" in output_of(export, old, str(output), "--format", "parquet", *here, code=1)
    assert output.read_bytes() == b"", "existing files are kept"
    assert output_of(export, str(tmp_path / "all.parquet"), *here).startswith(f"{PAGE + 4} rollouts of 2 batches")
    assert "there is no batch b0000000000" in output_of(export, "b0000000000", str(tmp_path / "x"), *here, code=1)
    assert not list(tmp_path.glob(".*")), "no partial file"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("OUT", "--filter", "reward=1"), "--filter reward: Extra inputs"),
        (("OUT", "--filter", "min_reward"), "is not NAME=VALUE"),
        (("OUT", "--filter", "outcome=solved"), "--filter outcome: Input should be"),
        (("OUT/there/x.jsonl",), "there is no folder"),
        (("OUT/there/x",), "there is no folder"),
        (("OUT/..",), "already exists: give a new folder"),
        (("OUT", "--url", "http://127.0.0.1:1"), "an API exports on its page"),
        (("b0123456789", "OUT", "--url", "OUT/none"), "no farm was ever started"),
    ],
)
def test_impossible_exports_are_refused_before_they_start(tmp_path: Path, words: tuple[str, ...], text: str) -> None:
    (tmp_path / "used").write_text("x")
    arguments = [each.replace("OUT", str(tmp_path / "out")) for each in words]
    arguments = [str(tmp_path) if each == f"{tmp_path}/out/.." else each for each in arguments]
    assert text in " ".join(output_of(export, *arguments, code=2 if "NAME=VALUE" in text else 1).split())
    assert [each.name for each in tmp_path.iterdir()] == ["used"]


class _Tracked(dict[str, Any]):
    """Values of a rollout whose deletion can be observed."""


def rollouts(n: int, alive: list[int]) -> Iterator[dict[str, Any]]:
    """Rollouts of half a megabyte; `alive` receives their number at each moment."""
    known: weakref.WeakValueDictionary[int, _Tracked] = weakref.WeakValueDictionary()
    tokens = np.arange(10_000, dtype=np.int32)
    for index in range(n):
        segment = dict.fromkeys(("prompt_ids", "response_ids", "policy_versions"), tokens)
        segment |= {"response_mask": np.ones(10_000, np.uint8), "response_logprobs": np.zeros(10_000, np.float32)}
        more = {"turn_rewards": ((3, 0.5),), "reward": None, "trainable": True, "mismatch": None, "images": ("ab",)}
        parts = [{"type": "text", "text": "half \ud800 of a pair"}, {"type": "image_url", "image_url": {"url": "x"}}]
        values: dict[str, Any] = dict.fromkeys(
            ("group_id", "data_source", "instance_id", "state", "outcome", "failure", "submitted_at", "finished_at")
        )
        values |= {"rollout_id": str(index), "reward": 1.0, "trainable": True, "attempt": 1, "versions": [1, 2]}
        values |= {"n_turns": 1, "n_response_tokens": 10_000, "rewards": [], "timings": []}
        values |= {"messages": [{"role": "user", "content": parts}], "segments": [segment | more]}
        values |= {"tools": [{"type": "function", "function": {"name": "half \ud800"}}]}
        made = _Tracked(values)
        known[index] = made
        gc.collect()
        alive.append(len(known))
        yield made


def test_written_rollouts_are_released(tmp_path: Path) -> None:
    alive: list[int] = []
    n_bytes = []
    for part in parquet_writer.parquet_parts(rollouts(80, alive)):
        n_bytes.append(len(part))
    assert max(alive) <= 3
    assert sum(n > 0 for n in n_bytes) > 3, "it is passed on part by part"
    for _ in map(written, rollouts(8, alive)):
        pass
    assert max(alive) <= 3
    folder = tmp_path / "dataset"
    folder.mkdir()
    assert write_dataset(folder, rollouts(8, alive)) == 8
    (row, *_) = parquet.read_table(folder / "data").to_pylist()
    assert row["messages"][0]["content"] == "half ? of a pair"
    assert [each["type"] for each in json.loads(row["messages"][0]["parts"])] == ["text", "image_url"]
    assert row["segments"][0]["turn_rewards"] == [{"index": 3, "reward": 0.5}]
    assert row["segments"][0]["images"] == ["ab"]
    assert json.loads(row["tools"]) == [{"type": "function", "function": {"name": "half \ud800"}}]
