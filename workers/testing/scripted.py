"""A test double of a policy server: speaks vLLM's chat API, token ids included, but plays scripts instead of a model.

`python -m workers.testing.scripted --book FILE` prints its URL (without `/v1`) once it listens. It says that it is a
double in `/v1/models` and in every answer's `system_fingerprint`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
import uuid
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from farm.trajectory import Message
from workers.testing import tokenizer
from workers.testing.book import PlayBook, Turn
from workers.testing.serving import serve

MODEL = "scripted-test-double"
FINGERPRINT = "test-double-that-plays-scripts"


class ScriptedServer:
    """The endpoints; `context_tokens` is the window, beyond which it refuses as vLLM does."""

    def __init__(
        self, book: PlayBook, *, seed: int = 0, latency_s: float = 0.0, context_tokens: int = 1_000_000
    ) -> None:
        self._book = book
        self._seed = seed
        self._latency_s = latency_s
        self._context_tokens = context_tokens
        self.weight_version = "0"

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/update_weight_version", self._update, methods=["POST"]),
            ]
        )

    async def _health(self, request: Request) -> Response:
        return Response()

    async def _models(self, request: Request) -> Response:
        model = {
            "id": MODEL,
            "object": "model",
            "created": 0,
            "owned_by": FINGERPRINT,
            "root": FINGERPRINT,
            "max_model_len": self._context_tokens,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def _update(self, request: Request) -> Response:
        self.weight_version = str((await request.json())["new_version"])
        return JSONResponse({"success": True, "new_version": self.weight_version})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        if body.get("stream"):
            return _refuse("this test double does not stream", "stream")
        messages = body["messages"]
        prompt = tokenizer.prompt_ids(messages, body.get("tools") or [])
        room = self._context_tokens - len(prompt)
        if room <= 0:
            return _refuse(
                f"This model's maximum context length is {self._context_tokens} tokens. However, your request has "
                f"{len(prompt)} input tokens.",
                "input_tokens",
            )
        await asyncio.sleep(self._latency_s)
        n_played = sum(message["role"] == "assistant" for message in messages)
        message = _message(self._book.next_turn(messages, body.get("seed")), n_played)
        allowed = min(room, body.get("max_completion_tokens") or body.get("max_tokens") or room)
        return JSONResponse(self._answer(body, prompt, message, allowed))

    def _answer(self, body: dict[str, Any], prompt: list[int], message: Message, allowed: int) -> dict[str, Any]:
        response, whole = tokenizer.response_ids(message, allowed)
        if not whole:
            message = {"role": "assistant", "content": tokenizer.decode(response)}
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "finish_reason": ("tool_calls" if message.get("tool_calls") else "stop") if whole else "length",
            "stop_reason": None,
            "logprobs": {"content": self._logprobs(prompt, response)} if body.get("logprobs") else None,
            "weight_versions": [{"version": self.weight_version, "start": 0, "end": len(response)}],
        }
        answer = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.get("model") or MODEL,
            "system_fingerprint": FINGERPRINT,
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(response),
                "total_tokens": len(prompt) + len(response),
            },
        }
        if body.get("return_token_ids"):
            choice["token_ids"] = response
            answer["prompt_token_ids"] = prompt
        return answer

    def _logprobs(self, prompt: list[int], response: list[int]) -> list[dict[str, Any]]:
        """Plausible and reproducible: one for each id, all negative."""
        draw = random.Random(f"{self._seed}/{len(prompt)}/{response}")  # noqa: S311  (no secret)
        return [
            {
                "token": tokenizer.decode([id_]),
                "logprob": -draw.expovariate(8.0) - 1e-6,
                "bytes": [],
                "top_logprobs": [],
            }
            for id_ in response
        ]


def _message(turn: Turn, n_played: int) -> Message:
    message: Message = {"role": "assistant", "content": turn.content}
    if turn.tool_calls:
        message["tool_calls"] = [
            {
                "id": f"call_{n_played}_{index}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.text},
            }
            for index, call in enumerate(turn.tool_calls)
        ]
    return message


def _refuse(message: str, param: str) -> JSONResponse:
    error = {"message": message, "type": "BadRequestError", "param": param, "code": 400}
    return JSONResponse({"error": error}, status_code=400)


def main() -> None:
    parser = argparse.ArgumentParser(description="A test double of a policy server that plays scripts.")
    parser.add_argument("--book", type=Path, required=True, help="JSON lines: {match, plays: [{name, weight, turns}]}")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--latency-s", type=float, default=0.0)
    parser.add_argument("--context-tokens", type=int, default=1_000_000)
    options = parser.parse_args()
    server = ScriptedServer(
        PlayBook.read(options.book, options.seed),
        seed=options.seed,
        latency_s=options.latency_s,
        context_tokens=options.context_tokens,
    )
    serve(server.app(), options.host, options.port, lambda url: print(url, flush=True))


if __name__ == "__main__":
    main()
