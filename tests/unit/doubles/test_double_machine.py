"""Log-probabilities of a double, like those of servers that apply the temperature first."""

from __future__ import annotations

import numpy as np

from farm.records.trajectory import token_ids
from tests.doubles import EngineDouble
from workers.testing.engine.web import SamplingRequest


def test_a_temperature_divides_log_probabilities() -> None:
    machine = EngineDouble().machine
    run = machine.run(SamplingRequest("r", token_ids([5, 9, 11]), 50, ignore_eos=True))
    run.sample(50, "1")
    before = machine.logprobs(run, 0, 50)
    assert len(before) == 50
    assert np.allclose(before / 2, machine.logprobs(run, 0, 50, 2.0))
    assert (machine.logprobs(run, 0, 50, 0.0) > -1e-5).all()
