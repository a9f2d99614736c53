"""The double as SGLang: answers as in SGLang's source code, since no SGLang runs here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.doubles import EngineDouble
from workers.conformance.trial import until
from workers.testing.engine.scheduler import SimulatedSpeed
from workers.testing.scripted_model import Branch, Script, ScriptedCall, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

_SOON_S = 120.0
LIST_FILES = ScriptedTurn(
    content="I look.", tool_calls=(ScriptedCall(name="bash", arguments={"command": "ls"}),), reasoning="hm"
)
SCRIPT = Script([ScriptedProblem(match="two", branches=(Branch(name="calls", turns=(LIST_FILES,)),))])
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}]
ENDLESS = {"input_ids": [5, 9, 11], "sampling_params": {"max_new_tokens": 5000, "ignore_eos": True}}


@pytest.fixture
def client() -> Iterator[httpx2.Client]:
    double = EngineDouble(wire="sglang", context_tokens=1000, weight_version="3")
    with serving(double.app()) as url, httpx2.Client(base_url=url) as client:
        yield client


def generate(client: httpx2.Client, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 40, "ignore_eos": True, **more.pop("sampling", {})}
    body = {"input_ids": [5, 9, 11], "sampling_params": sampling, "return_logprob": True, **more}
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def test_answer_has_ids_and_log_probabilities(client: httpx2.Client) -> None:
    answer = generate(client, return_prompt_token_ids=True, rid="mine")
    meta = answer["meta_info"]
    assert answer["prompt_token_ids"] == [5, 9, 11]
    assert [id_ for _, id_, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(value < 0 for value, _, _ in meta["output_token_logprobs"])
    assert meta["finish_reason"] == {"type": "length", "length": 40}
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == ("mine", 3, 40, 0)
    assert meta["weight_version"] == "3"
    assert meta["weight_versions"] == [{"version": "3", "start": 0, "end": 40}]
    assert "prompt_token_ids" not in generate(client)
    assert "output_token_logprobs" not in generate(client, return_logprob=False)["meta_info"]


def test_sampled_end_is_reported() -> None:
    with serving(EngineDouble(SCRIPT, wire="sglang").app()) as url, httpx2.Client(base_url=url) as client:
        answer = generate(client, sampling={"ignore_eos": False})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": answer["output_ids"][-1]}
    assert answer["text"].startswith("I am sorry")


def test_log_probabilities_are_computed_after_the_temperature(client: httpx2.Client) -> None:
    plain, hot = (generate(client, sampling={"temperature": t})["meta_info"] for t in (1.0, 2.0))
    values = [[value for value, _, _ in meta["output_token_logprobs"]] for meta in (plain, hot)]
    assert values[1] == pytest.approx([value / 2 for value in values[0]])


def test_stream_repeats_all_tokens_so_far(client: httpx2.Client) -> None:
    whole = generate(client)
    text = client.post(
        "/generate",
        json={
            "input_ids": [5, 9, 11],
            "sampling_params": {"max_new_tokens": 40, "ignore_eos": True},
            "return_logprob": True,
            "stream": True,
        },
    ).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    events = [json.loads(line) for line in lines]
    assert [len(event["output_ids"]) for event in events] == [*range(4, 40, 4), 40]
    assert [event["meta_info"]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert all(whole["output_ids"][: len(event["output_ids"])] == event["output_ids"] for event in events)
    assert all(whole["text"].startswith(event["text"]) for event in events)
    assert events[-1]["output_ids"] == whole["output_ids"]
    assert events[-1]["meta_info"]["output_token_logprobs"] == whole["meta_info"]["output_token_logprobs"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input_ids": [5] * 1000}, r"longer than the model's context length \(1000 tokens\)"),
        ({"input_ids": [5] * 980}, "maximum context length of 1000 tokens"),
        ({"input_ids": [5000]}, "vocab size"),
        ({"input_ids": []}, "empty"),
        ({}, "Either text or input_ids"),
        ({"text": "a", "input_ids": [5]}, "Either text or input_ids"),
        ({"input_ids": [5], "lora_path": "nope"}, "nope"),
    ],
)
def test_bad_requests_are_refused(client: httpx2.Client, body: dict[str, Any], message: str) -> None:
    answer = client.post("/generate", json=body)
    assert answer.status_code == 400
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(answer.json()["error"]["message"])


def test_chat_accepts_messages_or_ids() -> None:
    result = {
        "messages": [{"role": "user", "content": "two"}],
        "tools": TOOLS,
        "return_token_ids": True,
        "logprobs": True,
    }
    with serving(EngineDouble(SCRIPT, wire="sglang").app()) as url, httpx2.Client(base_url=url) as client:
        answer = client.post("/v1/chat/completions", json=result).json()
        (choice,) = answer["choices"]
        again = client.post("/v1/chat/completions", json={**result, "input_ids": choice["prompt_token_ids"]}).json()
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("\nhm\n", "\n\nI look.\n")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["bash"]
    assert choice["finish_reason"] == "tool_calls"
    assert (
        len(choice["response_token_ids"]) == len(choice["logprobs"]["content"]) == answer["usage"]["completion_tokens"]
    )
    assert again["choices"][0]["response_token_ids"] == choice["response_token_ids"]
    assert answer["metadata"]["weight_version"] == "default"


def test_information_endpoints(client: httpx2.Client) -> None:
    info, server = client.get("/model_info").json(), client.get("/server_info").json()
    assert info["model_path"] == server["model_path"] == client.get("/v1/models").json()["data"][0]["root"]
    assert (info["weight_version"], server["version"]) == ("3", "0.5.23")
    assert client.get("/ready").status_code == client.get("/health").status_code == 200
    assert "sglang:num_running_reqs" in client.get("/metrics").text


@pytest.mark.parametrize(("mode", "reason"), [("abort", "abort"), ("in_place", "length"), ("retract", "length")])
def test_paused_calls_continue_after_the_update(mode: str, reason: str) -> None:
    double = EngineDouble(wire="sglang", tokens_per_s=1000.0)

    async def check(url: str) -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=_SOON_S) as client:
            task = asyncio.create_task(client.post("/generate", json=ENDLESS))
            await until(lambda: double.n_tokens > 5, "tokens are sampled")
            assert (await client.post("/pause_generation", json={"mode": mode})).json()["status"] == "ok"
            assert (await client.get("/ready")).status_code == 503
            late = asyncio.create_task(client.post("/generate", json=ENDLESS))
            named = {"new_version": "9", "abort_all_requests": False}
            assert (await client.post("/update_weight_version", json=named)).json()["success"]
            double.scheduler.speed = SimulatedSpeed()
            await client.post("/continue_generation", json={})
            meta = (await task).json()["meta_info"]
            assert meta["finish_reason"]["type"] == reason
            assert [span["version"] for span in meta["weight_versions"]] == ["default", "9"][: 1 + (reason == "length")]
            assert (await late).json()["meta_info"]["completion_tokens"] == 5000

    with serving(double.app()) as url:
        asyncio.run(check(url))


def test_new_weight_version_aborts_running_calls_unless_disabled() -> None:
    double = EngineDouble(wire="sglang", tokens_per_s=1000.0)

    async def check(url: str) -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=_SOON_S) as client:
            task = asyncio.create_task(client.post("/generate", json=ENDLESS))
            await until(lambda: double.n_tokens > 5, "tokens are sampled")
            assert (await client.post("/flush_cache")).status_code == 400
            await client.post("/update_weight_version", json={"new_version": "9"})
            assert (await task).json()["meta_info"]["finish_reason"]["type"] == "abort"
            assert (await client.post("/flush_cache")).status_code == 200

    with serving(double.app()) as url:
        asyncio.run(check(url))


def test_ids_are_aborted_by_prefix() -> None:
    double = EngineDouble(wire="sglang", tokens_per_s=1000.0)

    async def check(url: str) -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=_SOON_S) as client:
            result = [client.post("/generate", json={**ENDLESS, "rid": rid}) for rid in ("a-1", "a-2", "b")]
            one, two, other = map(asyncio.create_task, result)
            await until(lambda: double.n_running == 3, "all run")
            await client.post("/abort_request", json={"rid": ""})
            assert double.n_running == 3
            await client.post("/abort_request", json={"rid": "a-"})
            reasons = [(await task).json()["meta_info"]["finish_reason"]["type"] for task in (one, two)]
            assert reasons == ["abort", "abort"]
            await client.post("/abort_request", json={"abort_all": True})
            assert (await other).json()["meta_info"]["finish_reason"]["type"] == "abort"

    with serving(double.app()) as url:
        asyncio.run(check(url))
