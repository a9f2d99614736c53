"""Stages that hang so that nothing of their own process can stop them: the farm goes on, and says which it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import farm
from tests.services.farms import embedded, farm_folder, left_of

PLAYS = {"data_source": "noop", "fields": {"seconds": 1.0}}
LIMITS = {"run_s": 3.0, "tool_s": 0.5}


@pytest.fixture
def folder() -> Iterator[Path]:
    with farm_folder() as made:
        yield made


@pytest.mark.parametrize(
    ("stuck", "kind", "words"),
    [
        # its own doing, with the place; what fell together with it is not
        ("loop", "agent_error", "blocked the event loop of its worker for 2 s in File"),
        ("deaf", "agent_error", "went on beyond its deadline"),
        # not even a thread of its process could say what it was
        ("lock", "lost", "was lost in stage run"),
    ],
)
def test_what_hangs_fails_alone(folder: Path, stuck: str, kind: str, words: str) -> None:
    hangs = {"data_source": "noop", "fields": {"seconds": 300.0, "stuck": stuck}}
    request = {"instances": [PLAYS] * 6 + [hangs] + [PLAYS] * 6, "limits": LIMITS, "max_attempts": 1, "max_losses": 0}
    free = {"instances": [PLAYS] * 4, "max_attempts": 1, "max_losses": 5}
    with (
        embedded(folder, FARM_STALL_S="2", FARM_OVERDUE_S="1") as here,
        farm.connect(here.home) as client,
    ):
        if stuck == "lock":
            # all that the process held is lost with it, and this batch does not allow for that
            request["instances"] = [hangs]
        found = client.collect(client.submit(request), timeout_s=120)
        [failed] = [rollout for rollout in found if rollout.state is farm.State.FAILED]
        assert failed.failure is not None
        assert failed.failure.kind == kind
        assert words in failed.failure.message
        others = [rollout for rollout in found if rollout is not failed]
        assert all(rollout.reward == 1.0 for rollout in others)
        again = client.collect(client.submit(free), timeout_s=120)
        assert all(rollout.reward == 1.0 for rollout in again), "its worker, or the next, plays on"
    assert left_of(folder) == []
