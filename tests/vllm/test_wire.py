"""The scripted engine's answers, and our clients' requests, checked by vLLM's own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx2
import orjson
import pytest

from farm.records.request import SamplingParams
from farm.records.trajectory import token_ids
from tests.doubles import EngineDouble
from tests.vllm.server import in_vllm
from workers.policy.engines.vllm import CompletionsWire, GenerateWire
from workers.policy.engines.wire import GenerationRequest, Wire, prompt_json
from workers.testing.serving import serving

PROMPT = token_ids([5, 6, 7, 300])
SAMPLING = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, stop=("END",), seed=11)
CHAT = {
    "model": "scripted-test-double",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 30,
    "logprobs": True,
    "return_token_ids": True,
    "return_weight_versions": True,
}


def body(wire: Wire, stream: bool) -> dict[str, Any]:
    ask = GenerationRequest(prompt_json(PROMPT), SAMPLING, 30, "scripted-test-double", stream)
    result: dict[str, Any] = orjson.loads(orjson.dumps(wire.body(ask)))
    return result


def judged(python: Path, values: list[tuple[str, Any]]) -> str:
    """Return the complaints of vLLM's classes; empty if there are none."""
    return in_vllm(python, "classes.py", "judge", stdin="".join(json.dumps(value) + "\n" for value in values))


def answered(url: str, path: str, asked: dict[str, Any]) -> list[Any]:
    """Return the answer, or the events of a stream."""
    answer = httpx2.post(url + path, json=asked)
    if "event-stream" not in answer.headers["content-type"]:
        return [answer.json()]
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_double_answers_validate_as_vllms(vllm_python: Path, version: str) -> None:
    wires: dict[str, Wire] = {"GenerateTokens": GenerateWire(), "Completion": CompletionsWire()}
    values: list[tuple[str, Any]] = []
    with serving(EngineDouble(version=version).app()) as url:
        for name, wire in wires.items():
            values += [(f"{name}Response", answer) for answer in answered(url, wire.path, body(wire, False))]
            values += [(f"{name}StreamResponse", event) for event in answered(url, wire.path, body(wire, True))]
        path = "/v1/chat/completions"
        streamed = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
        values += [("ChatCompletionResponse", answer) for answer in answered(url, path, CHAT)]
        values += [("ChatCompletionStreamResponse", event) for event in answered(url, path, streamed)]
        values += [("ErrorResponse", answer) for answer in answered(url, path, CHAT | {"model": "nope"})]
        values += [("ModelList", httpx2.get(f"{url}/v1/models").json())]
    assert {name for name, _ in values} >= {"GenerateTokensStreamResponse", "ChatCompletionStreamResponse"}
    assert judged(vllm_python, values) == ""


def test_requests_of_the_farm_are_parsed_by_vllm(vllm_python: Path) -> None:
    wires: dict[str, Wire] = {"GenerateRequest": GenerateWire(), "CompletionRequest": CompletionsWire()}
    values: list[tuple[str, Any]] = [
        (name, body(wire, stream)) for name, wire in wires.items() for stream in (False, True)
    ]
    assert judged(vllm_python, [*values, ("ChatCompletionRequest", CHAT)]) == ""


def test_wrong_answer_is_detected(vllm_python: Path) -> None:
    said = judged(vllm_python, [("CompletionResponse", {"choices": [{"index": "no"}]})])
    assert said.startswith("CompletionResponse")
    assert "index" in said
