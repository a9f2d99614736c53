"""verl accepts the farm's batches: V0's padded ones equal its own worker's, V1's rows are in a real TransferQueue."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.trainers.conftest import Program, are_of


def test_batch_of_v0_equals_that_of_verls_own_worker(run: Program) -> None:
    facts = run("verl_batches")
    same = facts["as_verls_worker"]
    assert len(same["tensors"]) == 8
    assert all(same["tensors"].values()), same["tensors"]
    assert (same["missing"], same["differing"]) == ([], [])
    assert same["extra_keys"] == [["acc"], ["acc"]]
    scores = facts["scores"]
    scored = scores[:4] + scores[8:]
    assert set(scored) <= {0.0, 1.0}
    assert scores[4:8] == [sum(scored) / 8] * 4
    assert facts["trained_tokens"][4:8] == [0] * 4
    assert (facts["broken_advantage"], facts["broken_gradient"]) == (0.0, 0.0)
    assert facts["versions"] == [5], "the weights were named after verl's step"
    assert facts["same_when_again"]
    assert facts["too_long"] == "actor_rollout_ref.rollout.response_length"
    assert facts["bounded"] == 1, "a rollout ends where verl's row is full"
    check_experts(facts["experts"])


def check_experts(experts: dict[str, Any]) -> None:
    """Compare the rows of a step with routing replay with the engine's routing; verl leaves the last token's at 0."""
    rows = experts["rows"]
    for place, (ids, of_ids) in enumerate([*rows, experts["v1"]]):
        if place in range(4, 8):
            assert np.all(np.array(of_ids)[:-1] == [0, 1, 2, 3]), "a broken row does not train"
        else:
            assert are_of(of_ids[:-1], ids)
        assert not np.any(of_ids[-1])
    assert (experts["type"], experts["v1_type"]) == ("torch.int16", "torch.int16")
    assert not experts["validated"]
    assert len(experts["as_verls_worker"]) == 9
    assert all(experts["as_verls_worker"].values()), experts["as_verls_worker"]


def test_prompts_of_v1_are_written_when_their_last_rollout_has_ended(run: Program) -> None:
    facts = run("verl_queue")
    assert facts["returned"] is None
    assert (facts["finished"], facts["failed"]) == (["u0", "u2"], ["u1"])
    assert facts["keys"] == [f"{uid}_{session}_0" for uid in ("u0", "u2") for session in range(3)]
    ours, theirs = facts["fields"]
    assert ours == theirs, "the fields that verl's own worker writes"
    assert facts["same_types"]
    assert len(facts["experts"]) == 6
    assert all(are_of(of_ids[:-1], ids) and not np.any(of_ids[-1]) for ids, of_ids in facts["experts"])
    assert {"global_steps", "max_global_steps", "min_global_steps", "seq_len", "status"} <= {*facts["tags"]}
    assert facts["steps"] == [5]
    assert set(facts["scores"]) <= {0.0, 1.0}
    assert facts["on_the_last_token"]
    rows = [f"survivors-{n}_{session}_0" for n in (2, 3) for session in range(n)]
    assert facts["one_survivor"] == {
        "0": ["failure", []],
        "1": ["failure", []],
        "2": ["failure", rows[:2]],
        "3": ["finished", rows[2:]],
    }, "a single row of a group would have its reward as its advantage"
