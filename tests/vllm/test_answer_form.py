"""The output format on a real vLLM: a model of random weights keeps to it only because its decoding is guided."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.server import RealVllm
from workers.plugins.interfaces import Completion
from workers.policy.answer_form import GUIDED, FormedSampling
from workers.policy.engines.capabilities import detect
from workers.policy.generation import EngineAddress, FormUnsupported
from workers.policy.policy import RolloutPolicy
from workers.policy.routing.backend import record_of
from workers.policy.routing.pool import EnginePool
from workers.policy.routing.router import RoutingKey, StickyRouter

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "n": {"enum": [1, 2]}},
    "required": ["colour", "n"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look", "paint")]


def answered(vllm: RealVllm, wire: str, sampling: FormedSampling, tokenizer: Path) -> Completion:
    async def ask() -> Completion:
        address = EngineAddress(f"{vllm.url}/v1", tokenizer=str(tokenizer))
        info = (await detect(address, timeout_s=60.0)).model_copy(update={"token_in": wire})
        pool = EnginePool(lambda: [record_of(address, info)])
        policy = RolloutPolicy(StickyRouter(pool, RoutingKey("r1")), "r1")
        try:
            return await policy.complete([{"role": "user", "content": "Which?"}], TOOLS, sampling, 600)
        finally:
            await pool.aclose()

    return asyncio.run(ask())


def is_of_the_schema(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"colour", "n"} and value["colour"] in ("red", "green") and value["n"] in (1, 2)


@pytest.mark.parametrize("wire", ["generate", "completions"])
def test_answer_follows_its_schema(vllm: RealVllm, wire: str) -> None:
    asked = FormedSampling(answer_schema=SCHEMA, required=True, seed=1)
    answer = answered(vllm, wire, asked, vllm.weights[0])
    assert answer.labels == {GUIDED: "yes"}
    assert answer.finish_reason == "stop"
    assert is_of_the_schema(answer.response["content"])


@pytest.mark.parametrize("wire", ["generate", "completions"])
@pytest.mark.parametrize("allowed", [("look", "paint"), ("paint",)])
def test_required_tool_is_called(vllm: RealVllm, wire: str, allowed: tuple[str, ...]) -> None:
    asked = FormedSampling(tool_choice="required", tools_allowed=allowed, required=True, seed=1)
    answer = answered(vllm, wire, asked, vllm.weights[0])
    assert answer.labels == {GUIDED: "yes"}
    calls = [call["function"] for call in answer.response["tool_calls"]]
    assert calls
    assert not answer.response["content"]
    assert {call["name"] for call in calls} <= set(allowed)
    assert all(is_of_the_schema(call["arguments"]) for call in calls)
    assert answer.n_invalid == 0


@pytest.mark.parametrize("tool_choice", [None, "required"])
def test_vllm_accepts_a_format_that_follows_open_reasoning(vllm: RealVllm, tmp_path: Path, tool_choice: Any) -> None:
    thinking = tmp_path / "thinking"
    shutil.copytree(vllm.weights[0], thinking, ignore=shutil.ignore_patterns("*.safetensors"))
    with (thinking / "chat_template.jinja").open("a") as template:
        template.write("{%- if add_generation_prompt %}{{- '<think>\\n' }}{%- endif %}")
    asked = FormedSampling(tool_choice=tool_choice, answer_schema=None if tool_choice else SCHEMA, required=True)
    answer = answered(vllm, "generate", asked, thinking)
    assert answer.labels == {GUIDED: "yes"}
    assert answer.response["reasoning_content"]
    if answer.finish_reason == "length":
        assert not answer.response["content"], "an untrained model thinks for long"
    else:
        text = answer.response["tool_calls"][0]["function"]["arguments"] if tool_choice else answer.response["content"]
        assert is_of_the_schema(text)


@pytest.mark.parametrize("schema", [{"type": "bogus"}, {"$ref": "#"}, {"type": "array", "uniqueItems": True}])
def test_schema_that_vllm_refuses_is_omitted_unless_it_is_required(vllm: RealVllm, schema: dict[str, Any]) -> None:
    answer = answered(vllm, "generate", FormedSampling(answer_schema=schema, seed=1), vllm.weights[0])
    assert answer.labels == {}
    assert answer.n_response_tokens
    with pytest.raises(FormUnsupported):
        answered(vllm, "generate", FormedSampling(answer_schema=schema, required=True), vllm.weights[0])
