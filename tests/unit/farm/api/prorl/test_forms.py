"""Requests of ProRL as batches, and stored calls as its messages: tables, without a farm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from farm.api.prorl import job_requests
from farm.api.prorl.job_requests import ProcessRequest, SamplingMix, fields_of, handler_of
from farm.api.prorl.job_results import conversation
from farm.errors import InvalidRequest, UnknownHandler
from farm.records.request import BatchRequest
from farm.records.trajectory import ModelCall, token_ids

SAMPLING: dict[str, Any] = {"model": "hosted_vllm/Qwen/Qwen3-4B", "api_key": "dummy_key", "temperature": 1.4}


def process_request(**values: Any) -> ProcessRequest:
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
def test_data_source_has_a_handler(data_source: str, handler: str) -> None:
    assert handler_of(data_source) == handler


@pytest.mark.parametrize("data_source", ["gui", "osworld", "near", "if_eval", "swebench_multimodal", "unknown"])
def test_unsupported_data_source_is_refused_by_name(data_source: str) -> None:
    with pytest.raises(UnknownHandler, match=data_source):
        handler_of(data_source)


def test_row_keeps_its_columns_without_fields_of_the_protocol() -> None:
    instance = {"data_source": "x", "trajectory_id": 1, "instance_id": "i", "question": "q"}
    assert fields_of(instance, "swebench") == {"instance_id": "i", "question": "q"}
    assert fields_of(instance, "chat") == {"question": "q"}


def batch_of(request: ProcessRequest, server: str = "") -> BatchRequest:
    return job_requests.batch_request(request, job_requests.sampling_of(request), server, "key", 77.0)


def test_sampling_mix_is_mapped_to_sampling_and_limits() -> None:
    mix = {
        "max_iterations": 30,
        "max_output_tokens": 1536,
        "max_model_len": 9000,
        "max_message_chars": 500,
        "enable_thinking": False,
        "top_p": 0.9,
    }
    batch = batch_of(process_request(sampling_params=SAMPLING | mix | {"custom_tokenizer": "/models/q"}), "http://e:1")
    assert (batch.sampling.temperature, batch.sampling.top_p, batch.sampling.max_tokens) == (1.4, 0.9, 1536)
    limits = batch.limits
    assert (limits.max_turns, limits.max_tokens, limits.max_row_tokens, limits.run_s) == (30, 9000, 9000, 77.0)
    assert limits.max_observation_chars == 500
    assert batch.chat_template_kwargs == {"enable_thinking": False}
    engine = (batch.engine_url, batch.engine_model, batch.engine_key, batch.engine_tokenizer)
    assert engine == ("http://e:1/v1", "Qwen/Qwen3-4B", "dummy_key", "/models/q")
    assert (batch.instances[0].data_source, batch.instances[0].fields["answer"]) == ("answer", "4")


@pytest.mark.parametrize(
    ("mix", "answer", "row", "sampled"),
    [
        ({}, 4096, None, 2 * 4096),
        ({"max_iterations": 30, "max_output_tokens": 100}, 100, None, 3000),
        ({"token_level_generation": False, "max_model_len": 500}, 4096, 500, 500),
        # with token ids, ProRL's server samples for as long as the context has room
        ({"token_level_generation": True, "max_output_tokens": 1536}, None, 32_768, 32_768),
        ({"token_level_generation": True, "max_output_tokens": 1536, "max_model_len": 900}, None, 900, 900),
    ],
)
def test_answers_and_rows_have_the_length_limits_of_prorls_server(
    mix: dict[str, Any], answer: int | None, row: int | None, sampled: int
) -> None:
    batch = batch_of(process_request(sampling_params=mix))
    assert batch.sampling.max_tokens == answer
    assert (batch.limits.max_row_tokens, batch.limits.max_tokens) == (row, sampled)


def test_omitted_values_are_the_defaults_of_prorls_server() -> None:
    batch = batch_of(process_request(sampling_params={}))
    assert (batch.sampling.temperature, batch.sampling.top_p, batch.limits.max_turns) == (0.0, 1.0, 2)
    assert (batch.limits.max_observation_chars, batch.limits.max_repeats) == (30_000, 4)
    assert batch_of(process_request(sampling_params={"strict_loop_detector": True})).limits.max_repeats == 2


def test_settings_of_the_client_library_are_ignored() -> None:
    given = {"timeout": 30, "max_input_tokens": 9, "reasoning_effort": "high", "num_retries": 4, "disable_vision": True}
    given |= {"input_cost_per_token": 0.1, "openrouter_app_name": "x", "base_url": None, "api_version": None}
    given |= {"custom_llm_provider": "hosted_vllm", "top_k": 20.0}
    batch, plain = (
        batch_of(process_request(sampling_params=given)),
        batch_of(process_request(sampling_params={"top_k": 20})),
    )
    assert batch == plain


@pytest.mark.parametrize(
    "given",
    [
        {"max_iteration": 3},
        {"base_url": "http://e"},
        {"enable_vision": True},
        {"enable_a11y_tree": True},
        {"api_version": "1"},
        {"aws_region_name": "x"},
        {"ollama_base_url": "http://e"},
        {"custom_llm_provider": "bedrock"},
        # ProRL's server refuses these as well
        {"stop": ["x"]},
        {"repetition_penalty": 1.1},
    ],
)
def test_unsupported_key_is_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        job_requests.sampling_of(process_request(sampling_params=given))
    assert [field for field, _ in refused.value.complaints] == [f"sampling_params.{name}" for name in given]


# from openhands/core/config/llm_config.py and openhands/nvidia/registry.py of ProRL
LLM_CONFIG = """
    model api_key base_url api_version aws_access_key_id aws_secret_access_key aws_region_name openrouter_site_url
    openrouter_app_name num_retries retry_multiplier retry_min_wait retry_max_wait timeout max_message_chars temperature
    top_p top_k custom_llm_provider max_input_tokens max_output_tokens input_cost_per_token output_cost_per_token
    ollama_base_url drop_params modify_params disable_vision caching_prompt log_completions log_completions_folder
    custom_tokenizer native_tool_calling reasoning_effort seed enable_thinking token_level_generation max_model_len
"""
AGENT_CONFIG = ["max_iterations", "ensure_thinking_end_properly", "strict_loop_detector"]
OF_OTHER_AGENTS = {"is_reasoning_task", "enable_vision", "enable_a11y_tree"}


def test_every_field_of_prorls_configuration_is_known() -> None:
    assert set(SamplingMix.model_fields) == {*LLM_CONFIG.split(), *AGENT_CONFIG} | OF_OTHER_AGENTS


def test_tool_calls_in_the_prompt_are_refused_only_by_text() -> None:
    for by_token in ({}, {"token_level_generation": False}, {"token_level_generation": None}):
        with pytest.raises(InvalidRequest, match="native_tool_calling"):
            job_requests.sampling_of(process_request(sampling_params={"native_tool_calling": False, **by_token}))
    job_requests.sampling_of(
        process_request(sampling_params={"native_tool_calling": False, "token_level_generation": True})
    )


def test_job_key_depends_on_its_name_and_its_parameters() -> None:
    assert job_requests.job_of(process_request()) == job_requests.job_of(process_request())
    assert job_requests.job_of(process_request()) != job_requests.job_of(process_request(sampling_params={}))
    named = job_requests.job_of(process_request(job_id="a"))
    assert (
        named.partition(":")[0]
        == job_requests.job_of(process_request(job_id="a", sampling_params={})).partition(":")[0]
    )
    assert named.partition(":")[0] != job_requests.job_of(process_request(job_id="b")).partition(":")[0]


def test_repeats_of_one_job_are_spread_over_the_servers() -> None:
    request = process_request(job_id="a")
    request.instance.pop("trajectory_id", None)
    chosen = [job_requests.server_of(request, ["a", "b"], f"key:{number}") for number in range(100)]
    assert 30 < chosen.count("a") < 70


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


def test_unfinished_reasoning_is_closed_on_request() -> None:
    function = {"name": "bash", "arguments": '{"a": 1}'}
    turn = call("<think>hm", [{"id": "1", "function": function}], [1], [2, 3])
    closed = conversation([turn, turn], True, True)
    assert not closed.ends_properly
    assert len(closed.messages) == 2
    text = '<think>hm\n\n<tool_call>\n{"name": "bash", "arguments": {"a": 1}}\n</tool_call></think>'
    assert (closed.messages[1]["content"], "tool_calls" in closed.messages[1]) == (text, False)
    assert conversation([turn], True, False).messages[1]["tool_calls"] == [function]


def test_row_with_the_most_sampled_tokens_is_returned() -> None:
    short, long = call("a", None, [1, 2], [3]), call("b", None, [7, 8], [9, 9, 9])
    messages = conversation([short, long], True, False).messages
    assert [message["content"] for message in messages] == ["u", "b"]
    assert messages[0]["token_ids"] == [7, 8]
    assert "token_ids" not in conversation([short], False, False).messages[0]
