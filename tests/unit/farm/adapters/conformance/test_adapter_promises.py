"""The conformance kit finds the faults of adapters: each promise fails for an adapter that breaks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from farm.adapters.arrays import ArraysAdapter
from farm.adapters.conformance.adapter_promises import examine_adapter
from farm.adapters.protocol import RowsPerRollout, TrainingRow, training_rows
from farm.records.rollout import Rollout


class PlainAdapter:
    """Rows as the kit reads them, with a fault."""

    rows_per_rollout: RowsPerRollout = "every"

    def __init__(self, fault: Callable[[list[TrainingRow]], list[TrainingRow]] = list) -> None:
        self._fault = fault

    def __call__(self, rollouts: Sequence[Rollout], /, *, min_version: int | None = None) -> list[TrainingRow]:
        return self._fault(
            [
                TrainingRow(
                    tuple(segment.prompt_ids.tolist()),
                    tuple(segment.response_ids.tolist()),
                    tuple(segment.response_mask.tolist()),
                    tuple(segment.response_logprobs.tolist()),
                    rollout.reward,
                    tuple(segment.policy_versions.tolist()),
                    rollout.rollout_id,
                )
                for rollout, segment in training_rows(rollouts, min_version)
            ]
        )

    def read(self, rows: list[TrainingRow], /) -> list[TrainingRow]:
        return rows


class ZeroRewards(PlainAdapter):
    """Returns broken rollouts as zeros."""

    def __call__(self, rollouts: Sequence[Rollout], /, *, min_version: int | None = None) -> list[TrainingRow]:
        zeros = [TrainingRow((1,), (1,), (1,), (0.0,), 0.0) for each in rollouts if each.reward is None]
        return super().__call__(rollouts, min_version=min_version) + zeros


class AnyVersion(PlainAdapter):
    """Returns rows of old weights, too."""

    def __call__(self, rollouts: Sequence[Rollout], /, *, min_version: int | None = None) -> list[TrainingRow]:
        return super().__call__(rollouts)


class Spoils(PlainAdapter):
    """Writes into the rollouts that it received."""

    def __call__(self, rollouts: Sequence[Rollout], /, *, min_version: int | None = None) -> list[TrainingRow]:
        rows = super().__call__(rollouts, min_version=min_version)
        for rollout in rollouts:
            for segment in rollout.segments:
                segment.response_mask[:] = 1
        return rows


def each(**changed: Callable[[TrainingRow], Any]) -> PlainAdapter:
    return PlainAdapter(
        lambda rows: [replace(row, **{name: new(row) for name, new in changed.items()}) for row in rows]
    )


FAULTS: dict[str, tuple[PlainAdapter, str]] = {
    "shifted tokens": (each(response_ids=lambda row: (*row.response_ids[1:], 0)), "in order, and no other"),
    "another order": (PlainAdapter(lambda rows: rows[::-1]), "in order, and no other"),
    "a row less": (PlainAdapter(lambda rows: rows[:-1]), "in order, and no other"),
    "the rollout of another": (each(rollout_id=lambda row: "b.0.0"), "in order, and no other"),
    "all sampled": (each(response_mask=lambda row: (1,) * len(row.response_ids)), "where the policy sampled"),
    "a short mask": (each(response_mask=lambda row: row.response_mask[1:]), "where the policy sampled"),
    "logprobs of none": (each(logprobs=lambda row: (0.0,) * len(row.response_ids)), "for all rows or for none"),
    "logprobs of some": (
        PlainAdapter(lambda rows: [replace(row, logprobs=None) if not k else row for k, row in enumerate(rows)]),
        "for all rows or for none",
    ),
    "one version": (each(versions=lambda row: (7,) * len(row.response_ids)), "versions, where"),
    "no reward": (each(reward=lambda row: None), "the reward of its rollout"),
    "halved rewards": (each(reward=lambda row: (row.reward or 1.0) / 2), "the reward of its rollout"),
    "zeros": (ZeroRewards(), "broke or was cancelled"),
    "any version": (AnyVersion(), "older or unknown weights"),
    "never empty": (PlainAdapter(lambda rows: rows or [TrainingRow((1,), (1,), (0,), (0.0,), 0.0)]), "nothing makes"),
    "spoils": (Spoils(), "stay as they were"),
    "never alone": (PlainAdapter(lambda rows: rows if len(rows) != 1 else []), "makes the same rows by itself"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_adapter_fails_the_promise(fault: str) -> None:
    adapter, promise = FAULTS[fault]
    broken = [result.promise for result in examine_adapter(adapter) if not result.ok]
    assert any(promise in each for each in broken), broken


@pytest.mark.parametrize("adapter", [PlainAdapter(), ArraysAdapter()])
def test_correct_adapter_keeps_all_promises(adapter: Any) -> None:
    assert all(result.ok for result in examine_adapter(adapter))


def test_exception_of_an_adapter_fails_the_promise() -> None:
    def fail(rows: list[TrainingRow]) -> list[TrainingRow]:
        raise ValueError("no room")

    results = list(examine_adapter(PlainAdapter(fail)))
    assert not any(result.ok for result in results)
    assert {result.fault for result in results} == {"it raised ValueError: no room"}
