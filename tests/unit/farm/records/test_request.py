"""A trainer's request is validated before anything is run."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from farm.client.request_checks import checked_request
from farm.errors import InvalidRequest
from farm.records.request import BatchRequest, Instance, SamplingParams
from workers.policy.generation import EngineAddress
from workers.process.worker import StoredRequest

ONE = (Instance(data_source="math", fields={}),)


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "generation_prompt"])
def test_reserved_template_variables_cannot_be_set(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name} cannot be set"):
        BatchRequest(instances=ONE, chat_template_kwargs={"enable_thinking": True, name: True})


def test_other_template_variables_can_be_set() -> None:
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
        *[("min_p", value) for value in (-0.1, 1.1)],
        *[("repetition_penalty", value) for value in (0, 2.1, float("nan"))],
        *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1)],
        *[("min_tokens", value) for value in (-1, 1.5)],
        *[("stop_token_ids", value) for value in ([-1], [0.5], 3, list(range(65)))],
        *[("cache_salt", value) for value in ("", "x" * 129, 7)],
        *[("routed_experts", value) for value in (0, 257, True, 8.0, "8")],
        ("n", 0.5),
    ],
)
def test_value_that_no_engine_accepts_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValidationError) as refusal:
        SamplingParams.model_validate({name: value})
    assert refusal.value.errors()[0]["loc"][0] == name


@pytest.mark.parametrize(
    "sampling",
    [
        *({"temperature": 2}, {"temperature": 0}, {"top_k": -1}, {"top_k": 0}, {"top_p": 1}),
        *(
            {"min_p": 0},
            {"repetition_penalty": 2},
            {"presence_penalty": -2},
            {"min_tokens": 0},
            {"stop_token_ids": [0]},
            {"routed_experts": 8},
        ),
    ],
)
def test_values_that_engines_accept_pass(sampling: dict[str, Any]) -> None:
    SamplingParams.model_validate(sampling)


@pytest.mark.parametrize("of_batch", [True, False])
def test_experts_are_refused_for_an_engine_route_without_ids(of_batch: bool) -> None:
    one, engine = {"data_source": "math", "fields": {}}, {"engine_url": "http://own/v1"}
    chat = engine | {"engine_route": "chat"}
    request = {"sampling": {"routed_experts": 8}}
    with pytest.raises(InvalidRequest, match="an engine with engine_route `chat` returns none"):
        checked_request({"instances": [one | ({} if of_batch else chat)], **request, **(chat if of_batch else {})})
    checked_request({"instances": [one | engine], **request})


def test_experts_are_refused_for_calls_with_images() -> None:
    request = {"instances": [{"data_source": "math", "fields": {}}], "sampling": {"routed_experts": 8}}
    with pytest.raises(InvalidRequest, match=r"calls with images, which agent_requests\.images allows, have none"):
        checked_request({**request, "agent_requests": {"images": "engine"}})
    checked_request({**request, "agent_requests": {"images": "text"}})


SECRET = "sk-this-is-a-secret"


def test_address_of_a_dedicated_engine_is_normalized() -> None:
    request = BatchRequest(instances=ONE, engine_url=" http://Trainer:80/sessions/7/v1/ ", engine_key=SECRET)
    assert request.engine_url == "http://trainer/sessions/7/v1"
    assert request.engine_settings.engine_key == SECRET
    assert SECRET not in repr(request)


@pytest.mark.parametrize(
    ("values", "field", "message"),
    [
        ({"engine_url": "ftp://h/v1"}, "engine_url", "is not an engine's address"),
        ({"engine_url": f"http://user:{SECRET}@h/v1"}, "engine_url", "must not hold a password"),
        ({"engine_url": "http://h/v1", "engine_key": f"{SECRET} \n"}, "engine_key", "printable ASCII"),
        ({"engine_key": SECRET}, "request", "engine_key is set, and no engine_url"),
        ({"engine_model": "m"}, "request", "engine_model is set, and no engine_url"),
        ({"engine_url": "http://h/v1", "engine_route": "guess"}, "engine_route", "'detect' or 'chat'"),
    ],
)
def test_invalid_dedicated_engine_is_refused_by_field_without_showing_its_key(
    values: dict[str, Any], field: str, message: str
) -> None:
    instance = {"data_source": "math", "fields": {}}
    with pytest.raises(InvalidRequest, match=message) as of_batch:
        checked_request({"instances": [instance]} | values)
    with pytest.raises(InvalidRequest, match=message) as of_instance:
        checked_request({"instances": [instance, instance | values]})
    assert of_batch.value.field == field
    assert of_instance.value.field == f"instances[1].{field}".removesuffix(".request")
    with pytest.raises(ValidationError) as direct:
        BatchRequest(instances=ONE, **values)
    for error in (of_batch.value, of_instance.value, direct.value):
        assert SECRET not in str(error)


def test_error_about_another_field_shows_no_key() -> None:
    with pytest.raises(ValidationError) as refusal:
        BatchRequest(engine_url="http://h/v1", engine_key=SECRET, n_samples=0)  # type: ignore[call-arg]
    assert {error["loc"] for error in refusal.value.errors()} == {("instances",), ("n_samples",)}
    assert SECRET not in str(refusal.value)


def test_engines_are_stored_once_and_an_instances_engine_overrides_the_batchs() -> None:
    plain, own = {"data_source": "math", "fields": {}}, {"engine_url": "http://own/v1", "engine_key": SECRET}
    request = BatchRequest.model_validate(
        {"instances": [plain, plain | own, plain | own], "engine_url": "http://batch/v1", "model": "m"}
    )
    stored = StoredRequest.model_validate(request.stored())
    assert [engine.engine_url for engine in stored.engines] == ["http://batch/v1", "http://own/v1"]
    engines = [stored.engine_for(index) for index in range(3)]
    assert engines == [
        EngineAddress("http://batch/v1", "m"),
        *[EngineAddress("http://own/v1", "m", SECRET)] * 2,
    ], "the batch's key must not be used for another engine"
    assert SECRET not in repr(stored)
    mixed = StoredRequest.model_validate(BatchRequest.model_validate({"instances": [plain, plain | own]}).stored())
    assert [mixed.engine_for(index) is None for index in range(2)] == [True, False]
    assert "engines" not in BatchRequest(instances=ONE).stored()


@pytest.mark.parametrize(
    ("roles", "field", "message"),
    [
        ({"judge": {}}, "roles.judge", "needs a server"),
        ({"judge": {"engine_key": SECRET, "model": "m"}}, "roles.judge", "and no engine_url"),
        ({"user": {"engine_url": f"http://u:{SECRET}@h/v1"}}, "roles.user.engine_url", "must not hold a password"),
        ({"user": {"model": "m", "sampling": {"routed_experts": 8}}}, "roles.user", "only recorded for the policy"),
        ({"critic": {"model": "m"}}, "roles.critic", "'judge', 'user' or 'helper'"),
    ],
)
def test_invalid_role_is_refused_by_its_field(roles: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refusal:
        checked_request({"instances": [{"data_source": "math", "fields": {}}], "roles": roles})
    assert refusal.value.field.startswith(field)
    assert SECRET not in str(refusal.value)


def test_engines_of_roles_are_stored_unchanged() -> None:
    judge = {"engine_url": "http://judge/v1", "engine_key": SECRET, "model": "m", "sampling": {"temperature": 0.5}}
    request = BatchRequest.model_validate({"instances": ONE, "roles": {"judge": judge, "user": {"model": "n"}}})
    assert StoredRequest.model_validate(request.stored()).roles == request.roles
    assert SECRET not in repr(request)
    assert StoredRequest.model_validate(BatchRequest(instances=ONE).stored()).roles == {}
