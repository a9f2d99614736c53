"""The adapter of NeMo Gym, with a server of its protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.doubles.protocols.nemo_gym_server import resource_server
from workers.environments.adapters.nemo_gym import NemoGym
from workers.environments.environment import Action, CalledTool, Episode

ROW = {
    "responses_create_params": {
        "input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Weather in Rome?"}],
        "tools": [{"type": "function", "name": "get_weather", "description": "d", "parameters": {"type": "object"}}],
    },
    "expected": "cold",
}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with resource_server() as address:
        yield address


def no_model(role: str, messages: object) -> str:
    raise AssertionError("it asks no model")


def test_tools_are_called_and_the_answer_is_verified(url: str) -> None:
    environment = NemoGym(no_model)
    begin = environment.reset(Episode(kwargs={"url": url, "row": ROW}))
    assert [message["role"] for message in begin.messages] == ["system", "user"]
    assert begin.tools[0]["function"] == {"name": "get_weather", "description": "d", "parameters": {"type": "object"}}
    step = environment.step(Action("", (CalledTool("c1", "get_weather", {"city": "Rome"}),)))
    assert step.messages[0]["tool_call_id"] == "c1"
    assert json.loads(step.messages[0]["content"]) == {"weather": "cold", "city": "Rome"}
    assert (step.reward, step.terminated) == (0.0, False)
    last = environment.step(Action("It is cold."))
    assert (last.reward, last.terminated) == (1.0, True)


def test_gymnasium_server_is_stepped_in_its_session(url: str) -> None:
    environment = NemoGym(no_model)
    begin = environment.reset(Episode(kwargs={"url": url, "row": ROW, "gymnasium": True}))
    assert begin.messages[-1] == {"role": "user", "content": "Say a word."}
    first, second = environment.step(Action("yes")), environment.step(Action("no"))
    assert (first.messages, first.reward, first.terminated) == ([{"role": "user", "content": "More."}], 0.5, False)
    assert (second.messages, second.reward, second.terminated) == ([], 0.0, True)


def test_refusing_or_missing_server_is_an_error(url: str) -> None:
    environment = NemoGym(no_model)
    with pytest.raises(OSError, match="422"):
        environment.reset(Episode(kwargs={"url": f"{url}/nothing", "row": {**ROW, "x": 1}}))
    with pytest.raises(OSError, match="refused"):
        NemoGym(no_model).reset(Episode(kwargs={"url": "http://127.0.0.1:9", "row": ROW}))
