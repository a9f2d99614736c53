"""The parameters that a bridge passes to a trainer's engine."""

from __future__ import annotations

import pytest

from farm.adapters.engine_bridge import known_parameters


def test_parameters_unknown_to_the_engine_are_dropped_if_neutral() -> None:
    sampling = {"temperature": 1.0, "cache_salt": "s", "detokenize": False, "structured_outputs": None}
    known = known_parameters(sampling, ("cache_salt", "detokenize", "structured_outputs"), ("structured_outputs",))
    assert known == {"temperature": 1.0}


def test_structured_outputs_are_refused_by_name() -> None:
    sampling = {"temperature": 1.0, "structured_outputs": {"json": {"type": "object"}}}
    with pytest.raises(ValueError, match="does not support structured_outputs"):
        known_parameters(sampling, (), ("structured_outputs",))
    assert known_parameters(sampling, (), ()) == sampling
