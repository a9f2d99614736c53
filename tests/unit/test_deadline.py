"""The time limits of the tests' own waits: a busy machine moves them away, a quiet one does not."""

from __future__ import annotations

import pytest

from testkit.deadline import Deadline, n_runnable, share
from tests.services.farms import until


@pytest.mark.parametrize(
    ("n_runnable", "n_cores", "expected"), [(0, 2, 1.0), (1, 2, 1.0), (2, 2, 1.0), (6, 2, 1 / 3), (1000, 2, 0.05)]
)
def test_a_second_counts_for_what_a_process_gets_of_a_processor(n_runnable: int, n_cores: int, expected: float) -> None:
    assert share(n_runnable, n_cores) == pytest.approx(expected)


def test_this_process_is_one_of_those_that_run() -> None:
    assert n_runnable() >= 1


def test_a_wait_in_vain_ends_and_says_for_what() -> None:
    assert not Deadline(60.0).passed()
    with pytest.raises(AssertionError, match=r"waited 0\.01 s in vain until never"):
        until(lambda: False, "never", 0.01)
