"""What a trainer asks for is checked before anything is played."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from farm.request import BatchRequest, Instance

ONE = (Instance(data_source="math", fields={}),)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "generation_prompt"])
def test_the_conversation_is_not_a_variable_of_the_template_to_set(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name} cannot be set"):
        BatchRequest(instances=ONE, chat_template_kwargs={"enable_thinking": True, name: True})


def test_other_variables_are_the_batchs_to_set() -> None:
    asked = BatchRequest(instances=ONE, chat_template_kwargs={"enable_thinking": False})
    assert asked.chat_template_kwargs == {"enable_thinking": False}
