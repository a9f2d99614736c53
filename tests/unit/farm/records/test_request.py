"""A trainer's request is validated before anything is run."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from farm.records.request import BatchRequest, Instance, SamplingParams

ONE = (Instance(data_source="math", fields={}),)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "generation_prompt"])
def test_the_conversation_is_not_a_variable_of_the_template_to_set(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name} cannot be set"):
        BatchRequest(instances=ONE, chat_template_kwargs={"enable_thinking": True, name: True})


def test_other_variables_are_the_batchs_to_set() -> None:
    batch_request = BatchRequest(instances=ONE, chat_template_kwargs={"enable_thinking": False})
    assert batch_request.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (2.01, 10, -0.1, float("nan"), float("inf"), "hot")],
        *[("top_p", value) for value in (0, 1.01, -1, float("nan"))],
        *[("top_k", value) for value in (-2, 2**31, 1.5)],
        *[("seed", value) for value in (-1, 2**63)],
        *[("max_tokens", value) for value in (0, -1)],
        *[("stop", value) for value in ([""], ["x"] * 65, "x", [1])],
        *[(name, 0.5) for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "n")],
    ],
)
def test_what_no_engine_takes_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as refusal:
        SamplingParams.model_validate({name: value})
    assert refusal.value.errors()[0]["loc"][0] == name


@pytest.mark.parametrize(
    "sampling", [{"temperature": 2}, {"temperature": 0}, {"top_k": -1}, {"top_k": 0}, {"top_p": 1}]
)
def test_what_engines_take_passes(sampling: dict[str, Any]) -> None:
    SamplingParams.model_validate(sampling)
