"""SGLang's chat, which takes token ids in place of messages; the double does not stream it."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from workers.testing.engine.asked import Asked, Refused, parsed
from workers.testing.engine.machine import Machine
from workers.testing.engine.run import Run
from workers.testing.engine.sglang.asking import Asking, finish
from workers.testing.engine.sglang.requests import Chat
from workers.testing.engine.vllm.sampling import complete
from workers.testing.engine.vllm.telling import CREATED, spans
from workers.testing.engine.web import Json, body_of, while_connected
from workers.testing.hermes import reasoned, strict_calls, tool_call


class ChatEndpoint:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._asking = Asking(machine)

    async def chat(self, request: Request) -> Response:
        body = parsed(Chat, await body_of(request))
        if body.stream:
            raise Refused("this test double does not stream chat in SGLang's way", param="stream")
        prompt = self._asking.prompt(None if body.input_ids is not None else self._rendered(body), body.input_ids)
        asked = self._asking.asked(
            request,
            body.rid,
            prompt,
            body.max_completion_tokens or body.max_tokens,
            temperature=body.temperature,
            stop=body.stop,
            seed=body.seed,
        )
        run = self._machine.run(asked)
        await while_connected(request.receive, complete([self._machine.sample(run)]))
        return Json(self._chat_answer(body, asked, run))

    def _chat_answer(self, body: Chat, asked: Asked, run: Run) -> dict[str, Any]:
        reasoning, said = reasoned(self._machine.text(run))
        content, calls = strict_calls(said) if body.tools and body.tool_choice != "none" else (said, ())
        message: dict[str, Any] = {"role": "assistant", "content": content, "reasoning_content": reasoning or None}
        message["tool_calls"] = [tool_call(call, f"call_{run.run_id}_{at}") for at, call in enumerate(calls)] or None
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "logprobs": {"content": self._chat_logprobs(asked, run)} if body.logprobs else None,
            "finish_reason": "tool_calls" if calls else run.finish_reason,
            "matched_stop": finish(run).get("matched"),
        }
        if body.return_token_ids or body.return_prompt_token_ids:
            choice["prompt_token_ids"] = self._machine.seen(asked)
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

    def _chat_logprobs(self, asked: Asked, run: Run) -> list[dict[str, Any]]:
        shown = self._machine.vocabulary.shown_as
        return [
            {"token": shown[id_], "logprob": value, "bytes": list(shown[id_].encode()), "top_logprobs": []}
            for value, id_, _ in self._asking.logprobs(asked, run, run.n_sampled, last=True)
        ]

    def _rendered(self, body: Chat) -> str:
        return self._machine.prompt_text(body.messages, body.tools, body.chat_template_kwargs)
