"""The time limits of the tests' own waits: a busy machine extends them, a quiet one does not."""

from __future__ import annotations

import pytest

from testkit.deadline import Deadline, n_runnable, share
from tests.services.farms import until


@pytest.mark.parametrize(
    ("n_runnable", "n_cores", "expected"), [(0, 2, 1.0), (1, 2, 1.0), (2, 2, 1.0), (6, 2, 1 / 3), (1000, 2, 0.05)]
)
def test_second_counts_by_the_processor_share_of_a_process(n_runnable: int, n_cores: int, expected: float) -> None:
    assert share(n_runnable, n_cores) == pytest.approx(expected)


def test_own_process_is_counted_as_runnable() -> None:
    assert n_runnable() >= 1


def test_wait_that_times_out_names_its_condition() -> None:
    assert not Deadline(60.0).passed()
    with pytest.raises(AssertionError, match=r"waited 0\.01 s without success until never"):
        until(lambda: False, "never", 0.01)
