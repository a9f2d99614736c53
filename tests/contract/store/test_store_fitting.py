"""Unstorable values are a fault of the component that supplied them."""

from __future__ import annotations

from typing import Any

import pytest

from farm.errors import EngineError, EvaluatorError
from farm.records.rollout import Stage, State
from farm.store import batches, rollouts, trajectories
from farm.store.database import Store
from tests.contract.store.test_store import advance, claimed, finish, new_batch, place
from tests.services.model_calls import model_call

CYCLE: dict[str, Any] = {}
CYCLE["again"] = CYCLE


def test_unstorable_details_are_an_evaluator_error(store: Store) -> None:
    batch_id = new_batch(store)
    place(store, batch_id)
    rollout_id = f"{batch_id}.0.0"
    advance(store, claimed(store, rollout_id, Stage.INIT))
    advance(store, claimed(store, rollout_id, Stage.RUN), policy_outcome="submitted", submission={})
    held = claimed(store, rollout_id, Stage.EVAL)
    for details in ({"a": object()}, {(1, 2): 3}, {"a": {1, 2}}, {"a": b"x"}, CYCLE):
        with pytest.raises(EvaluatorError, match=f"{rollout_id}: the score of test cannot be stored"):
            store.write(lambda c, details=details: rollouts.finish(c, held, 1.0, details, "test"))  # type: ignore[misc]
        assert store.read(lambda c: batches.rollout(c, rollout_id)).state is State.ACTIVE
    assert finish(store, held)


@pytest.mark.parametrize(
    "wrong", [{"n_cached_tokens": 2**70}, {"finish_reason": ["stop"]}, {"sampling": {"a": object()}}]
)
def test_unstorable_call_is_an_engine_error(store: Store, wrong: dict[str, Any]) -> None:
    batch_id = new_batch(store)
    call = model_call()
    row = trajectories.CallLog(f"{batch_id}.0.0", 1).row(call) | wrong
    with pytest.raises(EngineError, match="call 0 of engine http://e/v1 cannot be stored"):
        store.write(lambda c: trajectories.record_call(c, row))
