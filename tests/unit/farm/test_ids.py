"""Ids: built ids are parsed back, and ids from outside are parsed or refused."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farm import ids
from farm.errors import NotFound
from farm.ids import RolloutRef

BATCHES = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
INDEXES = st.integers(0, 999_999_999)


@given(BATCHES, INDEXES, INDEXES)
def test_built_id_is_parsed_into_its_parts(batch_id: str, group_index: int, sample_index: int) -> None:
    assert RolloutRef.of(batch_id) == RolloutRef(batch_id)
    assert RolloutRef.of(ids.group_id(batch_id, group_index)) == RolloutRef(batch_id, group_index)
    rollout_id = ids.rollout_id(batch_id, group_index, sample_index)
    assert RolloutRef.of(rollout_id) == RolloutRef(batch_id, group_index, sample_index)
    assert str(RolloutRef.of(rollout_id)) == rollout_id


@given(BATCHES, INDEXES, INDEXES, st.integers(1, 10_000))
def test_rollout_of_a_sandbox_is_parsed_from_its_id(batch_id: str, group: int, sample: int, attempt: int) -> None:
    rollout_id = ids.rollout_id(batch_id, group, sample)
    agent_sandbox = ids.sandbox_id(rollout_id, attempt)
    names = {agent_sandbox, ids.eval_sandbox_id(agent_sandbox), ids.prepare_sandbox_id(agent_sandbox)}
    assert len(names) == 3
    for name in (*names, rollout_id):
        assert ids.rollout_of_sandbox(name) == rollout_id
        assert ids.batch_of(name) == batch_id


def test_sandboxes_of_two_attempts_have_two_ids() -> None:
    assert ids.sandbox_id("b.0.1", 1) != ids.sandbox_id("b.0.1", 2)
    assert ids.rollout_of_sandbox("promise-1-ab") == "promise-1-ab"


@given(st.text(max_size=80))
def test_any_text_is_parsed_completely_or_refused(text: str) -> None:
    with suppress(NotFound):
        assert str(RolloutRef.of(text)).count(".") == text.count(".")


@pytest.mark.parametrize(
    "text", ["", ".", "b.", "b..1", "b.1.2.3", "b.-1", "b.x", "b 1", "b.1\n", "é", "b." + "9" * 10]
)
def test_invalid_id_is_refused(text: str) -> None:
    with pytest.raises(NotFound, match="there is no batch, group or rollout"):
        RolloutRef.of(text)


@pytest.mark.parametrize(("text", "kind"), [("b", "batch"), ("b.0", "group"), ("b.0.0", "rollout")])
def test_kind_of_an_id_is_decided_by_its_parts(text: str, kind: str) -> None:
    assert RolloutRef.of(text).kind == kind


def test_new_batches_have_unique_ids() -> None:
    made = {ids.new_batch_id() for _ in range(100)}
    assert len(made) == 100
    assert {RolloutRef.of(batch_id).kind for batch_id in made} == {"batch"}
