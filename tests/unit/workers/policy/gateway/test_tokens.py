"""Through each API and back, a conversation continues from the sampled ids."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from farm.records.request import SamplingParams
from farm.records.trajectory import Message
from tests.unit.workers.policy.gateway.serving import Served, served
from tests.unit.workers.policy.tokens.zoo import QWEN3
from workers.plugins.interfaces import Completion, OnDelta
from workers.policy import tool_calls
from workers.policy.tokens.session import TokenSession

SAMPLED = (
    '<think>\nhm\n</think>\n\nI look. \n<tool_call>\n{"name": "look",  "arguments": {"b": 2,"a" : "é"}}\n</tool_call>',
    "<think>\nseen\n</think>\n\nIt is a tree.",
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


class Sampling:
    """A policy that keeps ids, and samples these texts letter by letter, as no tokenizer would."""

    blocked = ""
    paused_s = 0.0

    def __init__(self) -> None:
        self._text = QWEN3.text()
        self._session = TokenSession(self._text)
        self._sampled = iter(SAMPLED)

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        max_tokens: int,
        on_delta: OnDelta | None = None,
    ) -> Completion:
        prompt, text = self._session.prompt(messages, tools), next(self._sampled)
        tokenizer, source = self._text.tokenizer, self._text.template.source
        ids = np.concatenate([*(tokenizer.encode(letter) for letter in text), tokenizer.encode(QWEN3.eos)])
        parsed = tool_calls.parser(tool_calls.detect(source), template=source).parse(text)
        message = tool_calls.message(parsed)
        self._session.commit(prompt, ids, message)
        for delta in tool_calls.deltas(message) if on_delta is not None else ():
            on_delta(delta)  # type: ignore[misc]
        return Completion(
            response=message,
            finish_reason="stop",
            engine="fake",
            n_prompt_tokens=len(prompt.ids),
            n_response_tokens=len(ids),
            prompt_ids=prompt.ids,
            response_ids=ids,
            response_logprobs=np.zeros(len(ids), np.float32),
            begins=prompt.begins,
        )


async def chat(gateway: Served) -> None:
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    said: list[Any] = [{"role": "user", "content": "look"}]
    create = gateway.openai.chat.completions.create
    message = (await create(model="m", messages=said, tools=tools)).choices[0].message
    assert message.tool_calls
    said.append(message.model_dump())
    said.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a tree"})
    await create(model="m", messages=said, tools=tools)


async def streamed(gateway: Served) -> None:
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    said: list[Any] = [{"role": "user", "content": "look"}]
    async with gateway.openai.chat.completions.stream(model="m", messages=said, tools=tools) as stream:
        async for _ in stream:
            pass
        message = (await stream.get_final_completion()).choices[0].message
    assert message.tool_calls
    said.append(message.model_dump(exclude={"parsed"}))
    said.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a tree"})
    await gateway.openai.chat.completions.create(model="m", messages=said, tools=tools)


async def responses(gateway: Served) -> None:
    tools: Any = [{"type": "function", "name": "look", "parameters": SCHEMA, "strict": False}]
    first = await gateway.openai.responses.create(model="m", input="look", tools=tools)
    call: Any = first.output[-1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "a tree"}
    items: Any = [{"role": "user", "content": "look"}, *(item.model_dump() for item in first.output), result]
    await gateway.openai.responses.create(model="m", input=items, tools=tools)


async def messages(gateway: Served) -> None:
    tools = [{"name": "look", "input_schema": SCHEMA}]
    said: list[Any] = [{"role": "user", "content": "look"}]
    body = {"model": "m", "max_tokens": 1000, "tools": tools, "messages": said}
    content = (await gateway.post("/v1/messages", body)).json()["content"]
    said.append({"role": "assistant", "content": content})
    result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": "a tree"}
    said.append({"role": "user", "content": [result]})
    response = await gateway.post("/v1/messages", body)
    assert response.status_code == 200


@pytest.mark.parametrize("client", [chat, streamed, responses, messages])
def test_sampled_ids_are_kept(client: Callable[[Served], Awaitable[None]]) -> None:
    async def main() -> None:
        async with served(Sampling()) as gateway:
            await client(gateway)
            first, second = gateway.records.calls
        assert (first.begins, second.begins) == ("first", "")
        assert first.prompt_ids is not None
        assert first.response_ids is not None
        assert second.prompt_ids is not None
        held = np.concatenate([first.prompt_ids, first.response_ids])
        assert np.array_equal(second.prompt_ids[: len(held)], held)
        assert [message["role"] for message in second.messages] == ["tool"]

    asyncio.run(main())
