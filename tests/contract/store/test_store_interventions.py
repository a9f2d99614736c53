"""Interventions during runs: cancels, acknowledgements, and arbitrary text of a model."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from farm.errors import InvalidRequest, NotFound
from farm.ids import RolloutRef
from farm.records.rollout import Failure, Outcome, Stage, State
from farm.records.trajectory import VersionSpan, token_ids
from farm.store import batches, cancel_and_rescore, consumers, rollouts, trajectories
from farm.store.database import Store
from farm.store.reports import audit
from farm.store.sql.sanitize import plain, written
from tests.contract.store.test_store import advance, claimed, finish, new_batch, place, run_to_end
from tests.services.model_calls import model_call

RUN_RESULT = {"policy_outcome": "submitted", "submission": {"answer": "42"}}


def cancel(store: Store, id: str) -> list[str]:
    return store.write(lambda connection: cancel_and_rescore.cancel(connection, RolloutRef.of(id)))


def acknowledge(store: Store, batch_id: str, cursor: int, consumer: str = "trainer") -> int:
    return store.write(lambda connection: consumers.acknowledge(connection, batch_id, consumer, cursor))


def violations(store: Store, batch_id: str) -> list[Any]:
    return store.read(lambda connection: audit.violations(connection, batch_id))


def test_concurrent_cancel_and_finish_have_one_winner(store: Store) -> None:
    batch_id = new_batch(store, 30)
    place(store, batch_id)
    held = {}
    for index in range(30):
        rollout_id = f"{batch_id}.{index}.0"
        advance(store, claimed(store, rollout_id, Stage.INIT))
        advance(store, claimed(store, rollout_id, Stage.RUN), **RUN_RESULT)
        held[rollout_id] = claimed(store, rollout_id, Stage.EVAL)
    start = threading.Barrier(8)

    def end(part: int) -> list[tuple[str, str]]:
        start.wait()
        mine = list(held)[part // 2 :: 4]
        if part % 2:
            return [(each, "cancelled") for each in mine if cancel(store, each)]
        return [(each, "finished") for each in mine if finish(store, held[each])]

    with ThreadPoolExecutor(8) as threads:
        won = [each for part in threads.map(end, range(8)) for each in part]
    assert sorted(rollout_id for rollout_id, _ in won) == sorted(held), "each was ended once, and by one of the two"
    states = {each.rollout_id: each.state for each in store.read(lambda c: batches.rollouts_of(c, batch_id))}
    assert states == {rollout_id: State.CANCELLED if who == "cancelled" else State.COMPLETED for rollout_id, who in won}
    assert violations(store, batch_id) == []


def test_cancel_during_claims_leaves_no_open_attempt(store: Store) -> None:
    batch_id = new_batch(store, 40)
    place(store, batch_id)

    def take(index: int) -> None:
        rollout_id = f"{batch_id}.{index}.0"
        store.write(lambda connection: rollouts.claim(connection, rollout_id, 1, Stage.INIT, "n1", "w", 60.0))

    with ThreadPoolExecutor(4) as threads:
        taking = threads.map(take, range(40))
        assert len(cancel(store, batch_id)) == 40
        list(taking)
    assert violations(store, batch_id) == []


def test_acknowledged_cursor_only_increases(store: Store) -> None:
    batch_id = new_batch(store, 3)
    place(store, batch_id)
    for index in range(3):
        run_to_end(store, f"{batch_id}.{index}.0")
    assert acknowledge(store, batch_id, 2) == 2
    assert acknowledge(store, batch_id, 1) == 2
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda n: acknowledge(store, batch_id, n % 4, f"c{n % 2}"), range(24)))
    for consumer, cursor in {"trainer": 2, "c0": 2, "c1": 3, "nobody": 0}.items():
        assert store.read(lambda c, consumer=consumer: consumers.acknowledged(c, batch_id, consumer)) == cursor  # type: ignore[misc]
    for beyond in (4, -1):
        with pytest.raises(InvalidRequest, match="cursor"):
            acknowledge(store, batch_id, beyond)
    with pytest.raises(NotFound):
        acknowledge(store, "b0", 0)


def test_recorded_calls_of_a_cancelled_rollout_are_returned(store: Store) -> None:
    batch_id = new_batch(store, 2)
    place(store, batch_id)
    for index in range(2):
        rollout_id = f"{batch_id}.{index}.0"
        advance(store, claimed(store, rollout_id, Stage.INIT))
        claimed(store, rollout_id, Stage.RUN)
    log = trajectories.CallLog(f"{batch_id}.0.0", 1)
    prompts, ids = ([1, 2], [1, 2, 3, 4]), ([3], [5, 6])
    for index, (prompt, response) in enumerate(zip(prompts, ids, strict=True)):
        call = model_call(index, n_prompt_tokens=len(prompt), n_response_tokens=len(response))
        call.prompt_ids, call.response_ids = token_ids(prompt), token_ids(response)
        call.response_logprobs = np.zeros(len(response), np.float32)
        call.versions = (VersionSpan("1", 0, len(response)),)
        store.write(lambda connection, call=call: trajectories.record_call(connection, log.row(call)))  # type: ignore[misc]
    assert store.read(lambda connection: trajectories.segments_of(connection, batch_id)) == {}, "it still runs"
    cancel(store, batch_id)
    for rollout_ids in (None, [f"{batch_id}.0.0"]):
        result = store.read(lambda c, ids=rollout_ids: trajectories.segments_of(c, batch_id, ids))  # type: ignore[misc]
        assert list(result) == [f"{batch_id}.0.0"]
        (row,) = result[f"{batch_id}.0.0"]
        assert row.prompt_ids.tolist() + row.response_ids.tolist() == [1, 2, 3, 4, 5, 6]
        assert row.response_mask.tolist() == [1, 0, 1, 1]


UGLY = "a\0b\ud800c"


def test_unstorable_text_is_sanitised(store: Store) -> None:
    batch_id = new_batch(store)
    place(store, batch_id)
    rollout_id = f"{batch_id}.0.0"
    advance(store, claimed(store, rollout_id, Stage.INIT))
    held = claimed(store, rollout_id, Stage.RUN)
    message = {"role": "assistant", "content": UGLY}
    call = model_call(messages=[message], response=message, finish_reason=UGLY * 20, policy_version=UGLY)
    call.observations, call.stop_reason, call.sampling = [message], UGLY, {"temperature": float("nan")}
    log = trajectories.CallLog(rollout_id, 1)
    store.write(lambda connection: trajectories.record_call(connection, log.row(call)))
    (kept,) = store.read(lambda connection: trajectories.calls(connection, rollout_id))
    assert (kept.messages, kept.response, kept.observations, kept.stop_reason) == ([message], message, [message], UGLY)
    assert kept.policy_version == "a\ufffdb\ufffdc"
    assert len(kept.finish_reason) <= 32
    assert kept.sampling == {"temperature": None}
    assert advance(store, held, policy_outcome="submitted", submission={"answer": UGLY})
    failure = Failure(Outcome.EVALUATOR_ERROR, UGLY + "x" * 10_000_000)
    held = claimed(store, rollout_id, Stage.EVAL)
    assert store.write(lambda connection: rollouts.fail(connection, held, failure, {}))
    result = store.read(lambda connection: batches.rollout(connection, rollout_id)).failure
    assert result is not None
    assert result.message.startswith("a\ufffdb\ufffdc")
    assert len(result.message) <= 100_000
    assert violations(store, batch_id) == []


def test_plain_text_is_cut_in_the_middle_to_fit() -> None:
    assert plain("abc", 3) == "abc"
    assert plain("abcd", 3) == "abc"
    assert plain("0123456789abcdef", 9) == "012...def"
    assert written({"a": [float("inf"), 1.5, "\ud800"]}) == '{"a": [null, 1.5, "\\ud800"]}'
