"""The farm reads as Harbor and terminal-bench did when they were asked; `make test-oracles` asks them again."""

from __future__ import annotations

import json

import pytest

from tests.oracles.doors import DOORS, Door, compared


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_recorded_answers_are_the_farm_s(door: Door) -> None:
    assert compared(door, json.loads(door.recorded.read_text())).faults == []
