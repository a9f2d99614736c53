"""slime's options as options of the collector, and its data source as a sampler."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from farm.adapters.conformance.adapter_promises import every_kind
from farm.adapters.slime_collecting import DataSourceInstances, collecting_options, is_collected, metrics_of
from farm.adapters.trainer_step import instance_of
from farm.collecting import CollectedStep
from farm.collecting.waves import Lengths
from farm.errors import InvalidRequest


@dataclass
class _Sample:
    group_index: int | None = None
    prompt: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


class _Source:
    """Three problems in a cycle, counted as slime's data source does."""

    def __init__(self, n_drawn: int = 0) -> None:
        self.n_drawn = n_drawn

    def get_samples(self, n: int) -> list[list[_Sample]]:
        first, self.n_drawn = self.n_drawn, self.n_drawn + n
        return [
            [
                _Sample(
                    place, f"prompt {place % 3}", {"farm_instance": {"data_source": "chat", "fields": {"n": place % 3}}}
                )
            ]
            for place in range(first, first + n)
        ]

    def __len__(self) -> int:
        return 3


def drawn(sampler: DataSourceInstances, n: int, state: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    instances, after = sampler.draw(n, state)
    return [each.fields["n"] for each in instances], after


def test_same_state_gives_the_same_instances() -> None:
    sampler = DataSourceInstances(_Source(), instance_of)
    numbers, state = drawn(sampler, 4, {})
    assert (numbers, state) == ([0, 1, 2, 0], {"drawn": 4})
    assert drawn(sampler, 2, state) == ([1, 2], {"drawn": 6})
    assert drawn(sampler, 2, state) == ([1, 2], {"drawn": 6}), "a wave that was not used is drawn again"
    assert len(sampler) == 3


def test_data_source_of_an_older_checkpoint_continues_from_the_state_of_the_run() -> None:
    assert drawn(DataSourceInstances(_Source(2), instance_of), 2, {"drawn": 7}) == ([1, 2], {"drawn": 9})


def test_data_source_that_is_ahead_continues_from_its_own_position() -> None:
    assert drawn(DataSourceInstances(_Source(9), instance_of), 1, {"drawn": 7}) == ([0], {"drawn": 10})


def test_state_of_another_sampler_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="sampler"):
        DataSourceInstances(_Source(), instance_of).draw(1, {"drawn": "x"})


def test_rollout_has_the_sample_of_its_problem_or_one_without_a_prompt() -> None:
    sampler = DataSourceInstances(_Source(), instance_of)
    (instance,), _ = sampler.draw(1, {})
    rollout = every_kind()[0]
    assert sampler.sample_of(rollout).prompt == rollout.instance_id
    sampler.samples[(rollout.data_source, rollout.instance_id)] = _Sample(0, "known")
    assert sampler.sample_of(rollout).prompt == "known"
    assert instance.instance_id, "an instance without a name gets one, by which its sample is found"


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({}, False),
        ({"over_sampling_batch_size": 8}, False),
        ({"over_sampling_batch_size": 12}, True),
        ({"dynamic_sampling_filter_path": "a.b"}, True),
    ],
)
def test_options_of_slime_decide_if_groups_are_selected(changed: dict[str, Any], wanted: bool) -> None:
    assert is_collected(SimpleNamespace(rollout_batch_size=8, **changed)) is wanted


def test_options_are_slimes_with_additional_ones_of_the_farm() -> None:
    args = SimpleNamespace(rollout_batch_size=8, over_sampling_batch_size=12)
    options = collecting_options(args, {"leftovers": "carry_over", "max_staleness": 1})
    assert (options.train_batch_size, options.max_inflight_groups, options.filter_groups) == (8, 12, "keep")
    assert (options.leftovers, options.max_staleness) == ("carry_over", 1)
    with pytest.raises(InvalidRequest, match="train_batch_size"):
        collecting_options(args, {"train_batch_size": 4})
    # slime's parser sets it to this where nothing is over-sampled
    args = SimpleNamespace(rollout_batch_size=8, over_sampling_batch_size=8)
    assert collecting_options(args, {}).max_inflight_groups is None


def test_metrics_include_lengths_of_trained_and_of_requested_samples() -> None:
    lengths = {"trained": Lengths(8, 80, 2, 30), "requested": Lengths(12, 240, 3, 120)}
    step = CollectedStep(
        "r", 1, (), {"equal_rewards": 3}, n_cancelled=2, n_requeued=1, n_carried=0, n_open=0, **lengths
    )
    assert metrics_of(step) == {
        "rollout/dynamic_filter/drop_equal_rewards": 3,
        "farm/n_cancelled_groups": 2,
        "farm/n_requeued_groups": 1,
        "farm/n_carried_groups": 0,
        "farm/trained_tokens": 10.0,
        "farm/requested_tokens": 20.0,
        "farm/trained_longest_tokens": 15.0,
        "farm/requested_longest_tokens": 40.0,
    }
