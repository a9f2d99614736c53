"""Records that a worker writes during an attempt: artefacts, under unique names and up to a limit."""

from __future__ import annotations

import asyncio
import os
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection

from farm.records.experts.expert_stretches import stretches_of
from farm.records.experts.routed_experts import CallExperts
from farm.records.rollout import Stage
from farm.records.trajectory import ModelCall, segments, token_ids
from farm.store import trajectories
from farm.store.blobs import artefacts
from farm.store.database import Store
from farm.store.rollouts import Claim
from tests.contract.store.test_store import advance, claimed, fail, finish, new_batch, place
from workers.plugins.interfaces import Artefact
from workers.process.recorder import AttemptRecorder


@pytest.fixture
def held(store: Store) -> Claim:
    batch_id = new_batch(store)
    place(store, batch_id)
    advance(store, claimed(store, f"{batch_id}.0.0", Stage.INIT))
    return claimed(store, f"{batch_id}.0.0", Stage.RUN)


def keep(recorder: AttemptRecorder, *artefacts: tuple[int, str, bytes]) -> list[str]:
    async def all_of_them() -> list[str]:
        return [await recorder.keep(index, Artefact(name, "text/plain", data)) for index, name, data in artefacts]

    return asyncio.run(all_of_them())


def test_artefact_names_are_unique_and_valid_file_names(store: Store, held: Claim) -> None:
    names = (
        "out.txt",
        "out.txt",
        "out.txt",
        "../../etc/é passwd",
        "no-dot",
        "no-dot",
        "",
        ".hidden",
        "x" * 300 + ".png",
    )
    value = keep(AttemptRecorder(store, held, 1.0), *((3, name, name.encode()) for name in names))
    assert value[:3] == ["3-out.txt", "3-out-2.txt", "3-out-3.txt"]
    assert value[4:6] == ["3-no-dot", "3-no-dot-2"]
    assert value[8].endswith("xxx.png")
    assert len(set(value)) == len(names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-") and len(name) <= 100 for name in value)
    for name, result in zip(value, names, strict=True):
        assert store.read(partial(artefacts.contents, rollout_id=held.rollout_id, name=name)) == result.encode()


def test_artefact_limit_counts_stored_bytes(store: Store, held: Claim) -> None:
    recorder = AttemptRecorder(store, held, 0.1)
    random = os.urandom(60_000)
    result = keep(recorder, (0, "a", b"a" * 5_000_000), (1, "b", random), (2, "c", random), (3, "d", b"small"))
    assert result == ["0-a", "1-b", "", "3-d"]
    kept_artefacts = store.read(lambda connection: artefacts.listing(connection, held.rollout_id))
    assert [(each.name, each.n_bytes) for each in kept_artefacts] == [("0-a", 5_000_000), ("1-b", 60_000), ("3-d", 5)]
    assert sum(each.n_stored for each in kept_artefacts) <= 100_000


def test_artefact_of_a_lost_claim_is_not_stored(store: Store, held: Claim) -> None:
    recorder = AttemptRecorder(store, held, 1.0)
    assert fail(store, held, 0.0)
    assert keep(recorder, (0, "a", b"late")) == [""]
    assert store.read(lambda connection: artefacts.listing(connection, held.rollout_id)) == []


def test_call_of_a_cancelled_rollout_is_recorded(store: Store, held: Claim) -> None:
    recorder = AttemptRecorder(store, held, 1.0)
    busy, free = threading.Event(), threading.Event()

    def slow(connection: Connection) -> None:
        busy.set()
        free.wait(600)

    async def cut_off() -> None:
        waiting = asyncio.wrap_future(store.submit(slow))
        await asyncio.to_thread(busy.wait, 30)
        recording = asyncio.ensure_future(recorder.record(sampled(0, [1, 2], [3])))
        await asyncio.sleep(0)
        recording.cancel()
        await asyncio.wait([recording])
        assert recording.cancelled()
        assert store.submit(slow).cancel(), "it waits, and is never made"
        free.set()
        await waiting

    asyncio.run(cut_off())
    # the store still writes, and has written
    assert store.write(lambda connection: True)
    [model_call] = store.read(lambda connection: trajectories.calls(connection, held.rollout_id))
    assert model_call.response_ids is not None
    assert model_call.response_ids.tolist() == [3]


def test_token_ids_of_continued_calls_are_held_once(store: Store, held: Claim) -> None:
    recorder = AttemptRecorder(store, held, 1.0)
    result = [
        sampled(index, list(range(10 * index + 5)), list(range(10 * index + 5, 10 * index + 10))) for index in range(50)
    ]

    async def all_of_them() -> None:
        for call in result:
            await recorder.record(call)
            await recorder.record(call)

    asyncio.run(all_of_them())
    memory = {id(_owner(ids)): _owner(ids).nbytes for call in result for ids in (call.prompt_ids, call.response_ids)}
    assert sum(memory.values()) == 500 * 4
    for index, call in enumerate(recorder.calls[index] for index in range(50)):
        assert call.prompt_ids is not None
        assert call.response_ids is not None
        assert call.prompt_ids.tolist() == list(range(10 * index + 5))
        assert call.response_ids.tolist() == list(range(10 * index + 5, 10 * index + 10))
    value = store.read(lambda connection: trajectories.calls(connection, held.rollout_id))
    assert value[49].prompt_ids is not None
    assert value[49].prompt_ids.tolist() == list(range(495))


def test_experts_are_written_once_and_freed_from_memory(store: Store, held: Claim) -> None:
    recorder = AttemptRecorder(store, held, 1.0)
    calls = [sampled(0, [1, 2], [3, 4]), sampled(1, [1, 2, 3, 4, 5], [6])]
    for call, n in zip(calls, (2, 1), strict=True):
        call.response_logprobs = np.full(n, -0.5, np.float32)
    ids = np.arange(5 * 48 * 8).reshape(5, 48, 8)
    calls[0].routed_experts = CallExperts.of(0, ids[:3].astype(np.uint8))
    calls[1].routed_experts = CallExperts.of(3, ids[3:].astype(np.uint16))

    async def all_of_them() -> None:
        for call in calls:
            await recorder.record(call)
            call.observations = [{"role": "tool", "content": "out"}]
            await recorder.record(call)

    asyncio.run(all_of_them())
    assert [call.routed_experts and call.routed_experts.ids for call in calls] == [None, None]
    [row] = segments(calls)
    stretches = [stretches_of(row, recorder.in_order())]
    batch_id = held.batch_id

    def ended(connection: Connection) -> None:
        trajectories.store_segments(connection, held.rollout_id, batch_id, held.attempt, [row], stretches)

    store.write(ended)
    assert advance(store, held, n_segments=1, policy_outcome="submitted", submission={"answer": "42"})
    assert finish(store, claimed(store, held.rollout_id, Stage.EVAL), 1.0)
    for experts in (False, True):
        found = store.read(partial(trajectories.segments_of, batch_id=batch_id, experts=experts))
        [kept] = found[held.rollout_id]
        assert (kept.routed_experts is not None) is experts
    assert kept.routed_experts is not None
    expected = np.concatenate([ids[:3].astype(np.uint8), ids[3:], np.zeros((1, 48, 8), int)])
    assert np.array_equal(kept.routed_experts.ids, expected)
    assert kept.routed_experts.known.tolist() == [1, 1, 1, 1, 1, 0]
    [first, second] = store.read(lambda connection: trajectories.calls(connection, held.rollout_id))
    assert (first.routed_experts, second.routed_experts) == (None, None)


def test_images_of_calls_and_rows_are_stored(store: Store, held: Claim) -> None:
    recorder = AttemptRecorder(store, held, 1.0)
    calls = [
        sampled(0, [1, 2], [3]),
        sampled(1, [1, 2, 3, 4], [6]),
        sampled(2, [1, 2, 3, 4], [6]),
        sampled(3, [7], [8]),
    ]
    for call, images in zip(calls, (("a",), ("a", "b"), ("c", "b"), ()), strict=True):
        call.response_logprobs = np.full(1, -0.5, np.float32)
        call.images = images

    async def all_of_them() -> None:
        for call in calls:
            await recorder.record(call)

    asyncio.run(all_of_them())
    # equal ids of another image are not a prefix of a prompt
    assert [call.begins for call in calls][:3] == ["first", "", calls[2].begins]
    assert "rendered again" in calls[2].begins
    kept = store.read(lambda connection: trajectories.calls(connection, held.rollout_id))
    assert [call.images for call in kept] == [call.images for call in calls]
    assert [call.prompt_ids.tolist() for call in kept if call.prompt_ids is not None][2] == [1, 2, 3, 4]
    rows = segments(recorder.in_order())
    store.write(
        lambda connection: trajectories.store_segments(connection, held.rollout_id, held.batch_id, held.attempt, rows)
    )
    assert advance(store, held, n_segments=3, policy_outcome="submitted", submission={"answer": "42"})
    assert finish(store, claimed(store, held.rollout_id, Stage.EVAL), 1.0)
    found = store.read(partial(trajectories.segments_of, batch_id=held.batch_id))
    assert [row.images for row in found[held.rollout_id]] == [("a", "b"), ("c", "b"), ()]


def sampled(index: int, prompt: list[int], response: list[int]) -> ModelCall:
    return ModelCall(
        index=index,
        messages=[],
        response={"role": "assistant", "content": ""},
        finish_reason="stop",
        engine="e",
        started_at=1.0,
        latency_s=0.5,
        n_prompt_tokens=len(prompt),
        n_response_tokens=len(response),
        prompt_ids=token_ids(prompt),
        response_ids=token_ids(response),
    )


def _owner(ids: Any) -> Any:
    return ids if ids.base is None else _owner(ids.base)
