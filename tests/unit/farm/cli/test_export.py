"""Files of `farm collect`: a line for every kind of rollout, and either a complete file or the previous one."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from farm.adapters.arrays import arrays
from farm.cli.export import check_writable, replaced
from farm.client.exports.rollout_line import rollout_line
from farm.errors import InvalidRequest
from farm.records.rollout import Failure, Outcome, Reward, Rollout, Stage, State, Timing
from farm.records.trajectory import ModelCall, Segment, token_ids


def segment(mismatch: int | None = None, logprob: float = -0.5) -> Segment:
    return Segment(
        token_ids([1, 2]),
        token_ids([3, 4, 5]),
        np.array([1, 0, 1], np.uint8),
        np.array([logprob, 0.0, -1.0], np.float32),
        token_ids([7, -1, 8]),
        mismatch,
    )


SCORED = Rollout(
    rollout_id="b1.0.0",
    batch_id="b1",
    group_index=0,
    sample_index=0,
    data_source="math",
    instance_id="übung \ud800",
    stage=Stage.EVAL,
    state=State.COMPLETED,
    attempt=2,
    node="n1",
    outcome=Outcome.SUBMITTED,
    reward=0.5,
    failure=None,
    n_turns=1,
    n_response_tokens=2,
    submitted_at=100.0,
    finished_at=104.5,
    finish_seq=1,
    segments=(segment(),),
)
CALL = ModelCall(
    index=0,
    messages=[{"role": "user", "content": "Lies \ud83d"}],
    response={"role": "assistant", "content": None, "tool_calls": []},
    finish_reason="tool_calls",
    engine="e",
    started_at=0.0,
    latency_s=0.25,
    n_prompt_tokens=2,
    n_response_tokens=2,
    observations=[{"role": "tool", "content": "ok"}],
    tools=[{"type": "function", "function": {"name": "look \ud83d", "parameters": {"maximum": 2**70}}}],
)
ENDED = replace(SCORED, reward=None, segments=(), state=State.FAILED)
KINDS: dict[str, Rollout] = {
    "a row": SCORED,
    "a mismatch": replace(SCORED, segments=(segment(mismatch=3),)),
    "several rows": replace(SCORED, segments=(segment(), segment(mismatch=0), segment())),
    "no rows, as the engine speaks text alone": replace(SCORED, segments=()),
    "infinite and undefined log-probabilities": replace(
        SCORED, segments=(segment(logprob=float("-inf")), segment(logprob=float("nan")))
    ),
    "failed": replace(ENDED, outcome=Outcome.ENGINE_ERROR, failure=Failure("engine_error", "it is gone\n")),
    "cancelled with rows": replace(
        ENDED, state=State.CANCELLED, outcome=Outcome.CANCELLED, segments=(segment(),), finished_at=None
    ),
    "stale": replace(ENDED, outcome=Outcome.STALE, failure=Failure("stale", "too old")),
    "never placed": replace(ENDED, state=State.CANCELLED, outcome=Outcome.CANCELLED, node=None, version_min=None),
}


def strict(data: bytes) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(data.decode("ascii"), parse_constant=refuse)


@pytest.mark.parametrize("rollout", KINDS.values(), ids=KINDS)
def test_every_kind_of_rollout_is_a_line(rollout: Rollout) -> None:
    timing = Timing(1, Stage.RUN, 1.0, 1.5, None, None, "lost", Failure("lost", "the worker"))
    reward = Reward(0.5, {"passed": [True], "nan": float("nan"), "score": np.float32(0.5)}, "answer", 9.0)
    data = rollout_line(rollout, [CALL, CALL], [timing], [reward])
    assert data.endswith(b"}\n")
    assert data.count(b"\n") == 1
    line = strict(data)
    assert (line["rollout_id"], line["reward"], line["state"]) == (rollout.rollout_id, rollout.reward, rollout.state)
    assert line["instance_id"] == "übung \ud800"
    assert [message["role"] for message in line["messages"]] == ["user", "assistant", "tool"] * 2
    assert line["tools"] == CALL.tools
    assert line["timings"] == [
        {
            "attempt": 1,
            "stage": "run",
            "node": None,
            "queued_s": 0.5,
            "work_s": None,
            "result": "lost",
            "failure": "the worker",
        }
    ]
    assert line["rewards"][0]["details"] == {"passed": [True], "nan": None, "score": 0.5}
    assert len(line["segments"]) == len(rollout.segments)
    for row, kept in zip(line["segments"], rollout.segments, strict=True):
        assert row["response_ids"] == [3, 4, 5]
        assert row["policy_versions"] == [7, -1, 8]
        assert (row["mismatch"], row["trainable"]) == (kept.mismatch, kept.trainable)
        assert all(value is None or isinstance(value, float) for value in row["response_logprobs"])
    assert (line["failure"] is None) == (rollout.failure is None)


def test_all_kinds_together_are_arrays_too(tmp_path: Path) -> None:
    with replaced(tmp_path / "b.npz") as file:
        np.savez_compressed(file, **arrays(list(KINDS.values())).as_dict())  # type: ignore[arg-type]
    with np.load(tmp_path / "b.npz") as loaded:
        assert loaded["rewards"].tolist() == [0.5] * 5
        assert loaded["response_mask"].shape == (5, 3)


def test_file_is_unchanged_if_its_replacement_is_not_finished(tmp_path: Path) -> None:
    target = tmp_path / "b.jsonl"
    target.write_bytes(b"old")
    with suppress(KeyboardInterrupt), replaced(target) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert target.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["b.jsonl"]


def test_full_disk_error_names_the_target_file(tmp_path: Path) -> None:
    (tmp_path / "b.npz").write_bytes(b"old")
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/b.npz'"), replaced(tmp_path / "b.npz"):
        Path("/dev/full").write_bytes(b"x" * 100_000)
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("b.npz", b"old")]


def test_replaced_file_keeps_its_mode_and_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    with replaced(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o640
    with replaced(tmp_path / "another") as file:
        file.write(b"new")
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "another").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("missing/b.npz", "there is no folder"),
        ("missing/deeper/b.npz", "there is no folder"),
        ("file/b.npz", "there is no folder"),
        ("folder.npz", "is a folder"),
        (r"C:\out\b.npz", "is a Windows path"),
        ("/proc/b.npz", "no file can be created in /proc"),
    ],
)
def test_unwritable_target_is_refused_at_once(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(InvalidRequest, match=why):
        check_writable(Path(name) if "\\" in name else tmp_path / name)
