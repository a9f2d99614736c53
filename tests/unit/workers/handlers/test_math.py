from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from workers.handlers.math import MathHandler, MathInstance, families

FIELDS: dict[str, Any] = {
    "family": "gcd",
    "question": "gcd of 4 and 6?",
    "answer": "2",
    "metadata": {"numbers": [4, 6]},
}


def test_families_are_those_of_reasoning_gym() -> None:
    # imported here, not by each test process, since it takes seconds
    from reasoning_gym.factory import DATASETS

    assert families() == set(DATASETS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"family": "gdc"}, "no family 'gdc'; use one of: .*gcd"),
        ({"question": ""}, "question"),
        ({"answer": 2}, "answer"),
        ({"extra": 1}, "extra"),
    ],
)
def test_invalid_fields_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        MathInstance.model_validate(FIELDS | change)


def test_policy_sees_the_question_and_not_the_answer() -> None:
    fields = FIELDS | {"answer": "SECRET"}
    text = str(MathHandler(MathInstance.model_validate(fields)).messages())
    assert "gcd of 4 and 6?" in text
    assert "SECRET" not in text
