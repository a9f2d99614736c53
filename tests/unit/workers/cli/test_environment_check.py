"""The differences between rollouts with the same actions."""

from __future__ import annotations

import pytest

from workers.cli.environment_check import ObservedStep, first_difference

STEP = ObservedStep([{"role": "user", "content": "a"}], 0.0, False)
OTHER = ObservedStep([{"role": "user", "content": "b"}], 0.0, False)
WORTH = ObservedStep([{"role": "user", "content": "a"}], 0.5, False)


@pytest.mark.parametrize(
    ("episodes", "difference"),
    [
        ([[STEP, STEP]] * 3, ""),
        ([[STEP], [OTHER], [STEP]], "the beginning differs in episode 2:"),
        (
            [[STEP, STEP], [STEP, STEP], [STEP, WORTH]],
            "the answer to action 1 differs in episode 3 (in a fresh process):",
        ),
        ([[STEP, STEP], [STEP], [STEP, STEP]], "episode 2 has 0 steps, and the first 1"),
    ],
)
def test_first_difference_is_named(episodes: list[list[ObservedStep]], difference: str) -> None:
    assert first_difference(episodes).startswith(difference)
    assert bool(first_difference(episodes)) is bool(difference)
