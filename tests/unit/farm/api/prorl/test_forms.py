"""Requests of ProRL as batches, and stored calls as its messages: tables, without a farm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from farm.api.prorl import job_requests
from farm.api.prorl.data_sources import fields_of, handler_of
from farm.api.prorl.requests import ProcessRequest
from farm.api.prorl.wire_messages import conversation
from farm.errors import InvalidRequest, UnknownHandler
from farm.records.trajectory import ModelCall, token_ids

SAMPLING: dict[str, Any] = {"model": "hosted_vllm/Qwen/Qwen3-4B", "api_key": "dummy_key", "temperature": 1.4}


def asked(**values: Any) -> ProcessRequest:
    instance = {"data_source": "deepscaler", "trajectory_id": 1, "prompt": "2+2", "answer": "4"}
    return ProcessRequest(**{"instance": instance, "sampling_params": SAMPLING} | values)


@pytest.mark.parametrize(
    ("data_source", "handler"),
    [
        ("swebench", "swe-bench"),
        ("r2egym", "swe-bench"),
        ("deepscaler", "answer"),
        ("stem_physics", "answer"),
        ("deepcoder_v2", "programs"),
        ("codecontests", "programs"),
        ("apps", "programs"),
        ("codeforces", "programs"),
        ("taco", "programs"),
        ("harbor", "harbor"),
    ],
)
def test_a_data_source_has_a_handler(data_source: str, handler: str) -> None:
    assert handler_of(data_source) == handler


@pytest.mark.parametrize("data_source", ["gui", "osworld", "near", "if_eval", "swebench_multimodal", "unheard"])
def test_one_that_is_not_played_is_refused_by_name(data_source: str) -> None:
    with pytest.raises(UnknownHandler, match=data_source):
        handler_of(data_source)


def test_a_row_keeps_its_columns_and_the_farms_own_fields_have_none_of_the_wire() -> None:
    instance = {"data_source": "x", "trajectory_id": 1, "instance_id": "i", "question": "q"}
    assert fields_of(instance, "swebench") == {"instance_id": "i", "question": "q"}
    assert fields_of(instance, "chat") == {"question": "q"}


def test_the_mix_goes_where_each_of_it_belongs() -> None:
    mix = {
        "max_iterations": 30,
        "max_output_tokens": 1536,
        "max_model_len": 9000,
        "enable_thinking": False,
        "top_p": 0.9,
    }
    request = asked(sampling_params=SAMPLING | mix | {"custom_tokenizer": "/models/q"})
    sampling = job_requests.sampling_of(request)
    batch = job_requests.batch_request(request, sampling, "http://e:1", "key", 77.0, {})
    assert (batch.sampling.temperature, batch.sampling.top_p, batch.sampling.max_tokens) == (1.4, 0.9, 1536)
    assert (batch.limits.max_turns, batch.limits.max_tokens, batch.limits.run_s) == (30, 9000, 77.0)
    assert batch.chat_template_kwargs == {"enable_thinking": False}
    engine = (batch.engine_url, batch.engine_model, batch.engine_key, batch.engine_tokenizer)
    assert engine == ("http://e:1/v1", "Qwen/Qwen3-4B", "dummy_key", "/models/q")
    assert (batch.instances[0].data_source, batch.instances[0].fields["answer"]) == ("answer", "4")


def test_what_is_left_out_is_as_in_its_server() -> None:
    request = asked(sampling_params={})
    sampling = job_requests.sampling_of(request)
    batch = job_requests.batch_request(request, sampling, "", "key", 300.0, {})
    assert (batch.sampling.temperature, batch.sampling.top_p, batch.limits.max_turns) == (0.0, 1.0, 2)


@pytest.mark.parametrize("key", ["max_iteration", "base_url", "strict_loop_detector", "enable_vision"])
def test_a_key_that_is_not_heeded_is_refused_by_name(key: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        job_requests.sampling_of(asked(sampling_params={key: True}))
    assert refused.value.complaints[0][0] == f"sampling_params.{key}"


def test_a_job_is_its_id_or_all_that_it_asks_for() -> None:
    assert job_requests.job_of(asked()) == job_requests.job_of(asked())
    assert job_requests.job_of(asked()) != job_requests.job_of(asked(sampling_params={}))
    assert job_requests.job_of(asked(job_id="a")) == job_requests.job_of(asked(job_id="a", sampling_params={}))
    assert job_requests.key_of("p:", "j", "http://a") != job_requests.key_of("p:", "j", "http://b")


def call(text: str, calls: list[dict[str, Any]] | None, prompt: list[int], sampled: list[int]) -> ModelCall:
    return ModelCall(
        index=0,
        messages=[{"role": "user", "content": [{"type": "text", "text": "u"}]}],
        response={"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {}),
        finish_reason="stop",
        engine="e",
        started_at=1.0,
        latency_s=0.5,
        n_prompt_tokens=len(prompt),
        n_response_tokens=len(sampled),
        prompt_ids=token_ids(prompt),
        response_ids=token_ids(sampled),
        response_logprobs=np.zeros(len(sampled), np.float32),
    )


def test_reasoning_without_an_end_is_closed_where_that_is_asked_for() -> None:
    function = {"name": "bash", "arguments": '{"a": 1}'}
    turn = call("<think>hm", [{"id": "1", "function": function}], [1], [2, 3])
    closed = conversation([turn, turn], True, True)
    assert not closed.ends_properly
    assert len(closed.messages) == 2
    text = '<think>hm\n\n<tool_call>\n{"name": "bash", "arguments": {"a": 1}}\n</tool_call></think>'
    assert (closed.messages[1]["content"], "tool_calls" in closed.messages[1]) == (text, False)
    assert conversation([turn], True, False).messages[1]["tool_calls"] == [function]


def test_of_two_rows_the_one_with_more_sampled_tokens_is_told() -> None:
    short, long = call("a", None, [1, 2], [3]), call("b", None, [7, 8], [9, 9, 9])
    told = conversation([short, long], True, False).messages
    assert [message["content"] for message in told] == ["u", "b"]
    assert told[0]["token_ids"] == [7, 8]
    assert "token_ids" not in conversation([short], False, False).messages[0]
