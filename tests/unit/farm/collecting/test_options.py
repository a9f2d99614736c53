"""Options of collecting: derived values, and one error that names each wrong option."""

from __future__ import annotations

from typing import Any

import pytest

from farm.collecting import CollectingOptions
from farm.errors import InvalidRequest


def test_defaults_are_derived_from_the_size_of_a_step() -> None:
    options = CollectingOptions(train_batch_size=32)
    assert (options.wave_size, options.most_in_flight, options.most_requested) == (4, 32, 960)
    assert CollectingOptions(train_batch_size=4).wave_size == 1
    assert CollectingOptions(train_batch_size=4, gen_batch_size=6).most_in_flight == 6
    # otherwise no wave would ever fit
    assert CollectingOptions(train_batch_size=64, max_inflight_groups=3).wave_size == 3
    assert CollectingOptions(train_batch_size=64, max_inflight_groups=9).wave_size == 8
    assert CollectingOptions(train_batch_size=4, max_num_gen_batches=0).most_requested is None


def test_groups_ahead_are_limited_by_what_can_train_in_time() -> None:
    options = CollectingOptions(train_batch_size=8, leftovers="carry_over", max_staleness=2)
    # in this step and two more; during training, its weights are one version older at the next collection
    assert (options.most_ahead(collects=True), options.most_ahead(collects=False)) == (24, 16)
    for unbounded in (
        CollectingOptions(train_batch_size=8, leftovers="carry_over", max_staleness=None),
        # the rest is cancelled, so none of it waits
        CollectingOptions(train_batch_size=8, leftovers="cancel", max_staleness=2),
    ):
        assert unbounded.most_ahead(collects=True) is None


@pytest.mark.parametrize(
    ("leftovers", "max_staleness", "carries_over"),
    [
        (None, 0, False),
        (None, 1, True),
        (None, 7, True),
        (None, None, True),
        ("cancel", 1, False),
        ("cancel", None, False),
        ("carry_over", 1, True),
    ],
)
def test_groups_in_flight_are_carried_over_if_they_can_train_later(
    leftovers: Any, max_staleness: int | None, carries_over: bool
) -> None:
    assert CollectingOptions(8, leftovers=leftovers, max_staleness=max_staleness).carries_over is carries_over


def test_groups_in_flight_are_limited_to_the_missing_ones_if_the_rest_is_lost() -> None:
    wanted = [CollectingOptions(16).most_wanted(n_missing, 0.4) for n_missing in (16, 6, 4, 1)]
    assert wanted == [16, 15, 10, 3]
    # a number that was set explicitly is kept to the end, and groups that train later are not lost
    assert CollectingOptions(16, max_inflight_groups=24).most_wanted(1, 0.4) == 24
    assert CollectingOptions(16, max_staleness=1).most_wanted(1, 0.4) == 16


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        ({"train_batch_size": 0}, ["train_batch_size"]),
        ({"train_batch_size": 2.5}, ["train_batch_size"]),
        ({"train_batch_size": True}, ["train_batch_size"]),
        ({"gen_batch_size": 0, "max_inflight_groups": -1}, ["gen_batch_size", "max_inflight_groups"]),
        ({"filter_groups": True}, ["filter_groups"]),
        ({"leftovers": "keep"}, ["leftovers"]),
        ({"max_staleness": -1}, ["max_staleness"]),
        ({"leftovers": "carry_over"}, ["max_staleness"]),
        ({"leftovers": ""}, ["leftovers"]),
        ({"gen_batch_size": 8, "max_inflight_groups": 4}, ["max_inflight_groups"]),
        ({"max_num_gen_batches": "3"}, ["max_num_gen_batches"]),
        ({"min_samples": 4, "early_stop_samples": 3}, ["early_stop_samples"]),
    ],
)
def test_wrong_options_are_named(values: dict[str, Any], fields: list[str]) -> None:
    with pytest.raises(InvalidRequest) as error:
        CollectingOptions(**{"train_batch_size": 4, **values})
    assert [field for field, _ in error.value.complaints] == fields


def test_number_of_samples_is_checked() -> None:
    assert CollectingOptions(4).check_samples(8) == 8
    assert CollectingOptions(4, min_samples=3).check_samples(8) == 3
    assert CollectingOptions(4, early_stop_samples=5).check_samples(8) == 5
    assert CollectingOptions(4, min_samples=3, early_stop_samples=5).check_samples(8) == 3
    assert CollectingOptions(4, filter_groups="keep").check_samples(1) == 1
    for options, n_samples, field in (
        (CollectingOptions(4, min_samples=9), 8, "min_samples"),
        (CollectingOptions(4, min_samples=1), 8, "min_samples"),
        (CollectingOptions(4), 1, "n_samples"),
    ):
        with pytest.raises(InvalidRequest) as error:
            options.check_samples(n_samples)
        assert error.value.field == field
