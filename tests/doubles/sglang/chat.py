"""SGLang's chat, which accepts token ids in place of messages; the double does not stream it."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tests.doubles.double_machine import DoubleMachine
from tests.doubles.sglang.prompts import RequestReader, finish
from tests.doubles.sglang.requests import SglangChatBody
from tests.doubles.vllm.image_parts import with_places
from workers.testing.engine.scheduler import EngineRun
from workers.testing.engine.vllm.sampling import CREATED, complete, spans
from workers.testing.engine.web import Json, RequestRefused, body_of, parsed, while_connected
from workers.testing.hermes_text import reasoned, strict_calls, tool_call


class ChatEndpoint:
    def __init__(self, machine: DoubleMachine) -> None:
        self._machine = machine
        self._asking = RequestReader(machine)

    async def chat(self, request: Request) -> Response:
        body = parsed(SglangChatBody, await body_of(request))
        if body.stream:
            raise RequestRefused("this test double does not stream chat in SGLang's way", param="stream")
        prompt = self._asking.prompt(None if body.input_ids is not None else self._rendered(body), body.input_ids)
        sampling_request = self._asking.sampling_request(
            body.rid,
            prompt,
            body.max_completion_tokens or body.max_tokens,
            stop=body.stop,
            seed=body.seed,
        )
        run = self._machine.run(sampling_request)
        await while_connected(request.receive, complete([self._machine.sample(run)]))
        return Json(self._chat_answer(body, run))

    def _chat_answer(self, body: SglangChatBody, run: EngineRun) -> dict[str, Any]:
        reasoning, text = reasoned(self._machine.text(run))
        content, calls = strict_calls(text) if body.tools and body.tool_choice != "none" else (text, ())
        message: dict[str, Any] = {"role": "assistant", "content": content, "reasoning_content": reasoning or None}
        message["tool_calls"] = [tool_call(call, f"call_{run.run_id}_{at}") for at, call in enumerate(calls)] or None
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "logprobs": {"content": self._chat_logprobs(body, run)} if body.logprobs else None,
            "finish_reason": "tool_calls" if calls else run.finish_reason,
            "matched_stop": finish(run).get("matched"),
        }
        if body.return_token_ids or body.return_prompt_token_ids:
            choice["prompt_token_ids"] = run.prompt
        if body.return_token_ids:
            choice["response_token_ids"] = run.ids
        n = run.n_sampled
        return {
            "id": run.run_id,
            "object": "chat.completion",
            "created": CREATED,
            "model": self._machine.name,
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(run.prompt),
                "total_tokens": len(run.prompt) + n,
                "completion_tokens": n,
                "prompt_tokens_details": None,
                "reasoning_tokens": 0,
            },
            "metadata": {"weight_version": self._machine.scheduler.version, "weight_versions": spans(run)},
        }

    def _chat_logprobs(self, body: SglangChatBody, run: EngineRun) -> list[dict[str, Any]]:
        shown = self._machine.vocabulary.shown_as
        return [
            {"token": shown[id_], "logprob": value, "bytes": list(shown[id_].encode()), "top_logprobs": []}
            for value, id_, _ in self._asking.logprobs(run, run.n_sampled, body.temperature)
        ]

    def _rendered(self, body: SglangChatBody) -> str:
        # its template would drop an image silently
        messages = with_places(body.messages, self._machine.name, takes_images=False)
        return self._machine.prompt_text(messages, body.tools, body.chat_template_kwargs)
