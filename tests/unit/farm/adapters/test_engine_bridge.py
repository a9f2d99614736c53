"""The parameters that a bridge hands to a trainer's engine."""

from __future__ import annotations

import pytest

from farm.adapters.engine_bridge import known_parameters


def test_what_a_trainers_engine_does_not_need_is_dropped() -> None:
    sampling = {"temperature": 1.0, "cache_salt": "s", "detokenize": False, "structured_outputs": None}
    known = known_parameters(sampling, ("cache_salt", "detokenize", "structured_outputs"), ("structured_outputs",))
    assert known == {"temperature": 1.0}


def test_a_form_of_answers_is_refused_by_name() -> None:
    sampling = {"temperature": 1.0, "structured_outputs": {"json": {"type": "object"}}}
    with pytest.raises(ValueError, match="does not support structured_outputs"):
        known_parameters(sampling, (), ("structured_outputs",))
    assert known_parameters(sampling, (), ()) == sampling
