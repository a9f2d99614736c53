"""The differences between rollouts with the same actions."""

from __future__ import annotations

import pytest

from workers.cli.environment_check import PlayedStep, first_difference

SAID = PlayedStep([{"role": "user", "content": "a"}], 0.0, False)
OTHER = PlayedStep([{"role": "user", "content": "b"}], 0.0, False)
WORTH = PlayedStep([{"role": "user", "content": "a"}], 0.5, False)


@pytest.mark.parametrize(
    ("plays", "difference"),
    [
        ([[SAID, SAID]] * 3, ""),
        ([[SAID], [OTHER], [SAID]], "the beginning differs in play 2:"),
        ([[SAID, SAID], [SAID, SAID], [SAID, WORTH]], "the answer to action 1 differs in play 3 (in a fresh process):"),
        ([[SAID, SAID], [SAID], [SAID, SAID]], "play 2 has 0 steps, and the first 1"),
    ],
)
def test_first_difference_is_named(plays: list[list[PlayedStep]], difference: str) -> None:
    assert first_difference(plays).startswith(difference)
    assert bool(first_difference(plays)) is bool(difference)
