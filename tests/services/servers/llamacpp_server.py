"""llama.cpp's server with a made-up model: the answers of `/completion`, `/props` and the model list.

The message formats are from tools/server/README.md of llama.cpp. A stream has an event for each token, but none for a
token that ends within a character, and no `[DONE]`; its last event counts the tokens.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

_STOP = 1 / 600
"""The probability that a token is the last."""


class LlamaCppServer:
    """One server. `context_tokens` is its `n_ctx`; `torn_at` is the position of a token that ends within a character.

    `ends_at` is the number of tokens after which a stream ends without its last event.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        context_tokens: int = 2048,
        tokens_per_s: float = 2000.0,
        torn_at: int | None = None,
        ends_at: int | None = None,
    ) -> None:
        self.requests: list[dict[str, Any]] = []
        self.n_running = 0
        self._tokenizer = tokenizer
        self._letters = [index for index in range(tokenizer.get_vocab_size()) if _is_plain(tokenizer.decode([index]))]
        self._eos = tokenizer.get_vocab_size() - 1
        self._context_tokens = context_tokens
        self._pause_s = 1 / tokens_per_s
        self._torn_at = torn_at
        self._ends_at = ends_at
        self._seen: list[list[int]] = []

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", lambda _: JSONResponse({"status": "ok"})),
                Route("/v1/models", self._models),
                Route("/props", self._props),
                Route("/metrics", self._metrics),
                Route("/completion", self._completion, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    def _models(self, _: Request) -> Response:
        card = {"id": "m", "object": "model", "owned_by": "llamacpp", "meta": {"n_ctx_train": 8192}}
        return JSONResponse({"object": "list", "data": [card]})

    def _props(self, _: Request) -> Response:
        settings = {"n_ctx": self._context_tokens}
        return JSONResponse({"build_info": "b6000-0123abc", "total_slots": 4, "default_generation_settings": settings})

    def _metrics(self, _: Request) -> Response:
        return PlainTextResponse(f"llamacpp:requests_processing {self.n_running}\n")

    async def _chat(self, request: Request) -> Response:
        """Return only text: its chat has no ids."""
        await request.json()
        choice = {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
        return JSONResponse({"choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": 2}})

    async def _completion(self, request: Request) -> Response:
        body = await request.json()
        self.requests.append(body)
        prompt = body["prompt"]
        if not all(0 <= token < self._tokenizer.get_vocab_size() for token in prompt):
            return _refusal("Prompt contains invalid tokens", "invalid_request_error")
        if len(prompt) >= self._context_tokens:
            text = f"request ({len(prompt)} tokens) exceeds the available context size ({self._context_tokens} tokens)"
            return _refusal(f"{text}, try increasing it", "exceed_context_size_error")
        assert body["stream"], "only streams are scripted"
        return StreamingResponse(self._events(body), media_type="text/event-stream")

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        ids: list[int] = []
        prompt, stops = body["prompt"], body.get("stop") or []
        n_cached = max((_common(prompt, seen) for seen in self._seen), default=0)
        draws = random.Random(json.dumps([body.get("seed", random.random()), prompt]))
        end: tuple[str, str] | None = None
        self.n_running += 1
        try:
            while end is None:
                if len(ids) == self._ends_at:
                    return
                await asyncio.sleep(self._pause_s)
                ids.append(self._next([*prompt, *ids], body["top_k"] == 1, draws))
                if len(ids) - 1 != self._torn_at:
                    yield _event(self._partial([*prompt, *ids], len(ids)))
                end = self._end(ids, stops, min(body["n_predict"], self._context_tokens - len(prompt)))
            self._seen.append([*prompt, *ids])
            last = {"tokens_predicted": len(ids), "stop_type": end[0], "stopping_word": end[1]}
            yield _event({"content": "", "tokens": [], "stop": True, "timings": {"cache_n": n_cached}} | last)
        finally:
            self.n_running -= 1

    def _next(self, before: Sequence[int], greedy: bool, draws: random.Random) -> int:
        if greedy:
            return self._letters[_hash(before) % len(self._letters)]
        return self._eos if draws.random() < _STOP else draws.choice(self._letters)

    def _partial(self, ids: Sequence[int], n: int) -> dict[str, Any]:
        entry = {"id": ids[-1], "token": "x", "logprob": -(_hash(ids) % 1000) / 200 - 0.001, "top_logprobs": []}
        event = {"content": "x", "tokens": [ids[-1]], "stop": False, "tokens_predicted": n}
        return event | {"completion_probabilities": [entry]}

    def _end(self, ids: list[int], stops: Sequence[str], most: int) -> tuple[str, str] | None:
        text = self._tokenizer.decode(ids)
        if word := next((stop for stop in stops if stop in text), None):
            return "word", word
        if ids[-1] == self._eos:
            return "eos", ""
        return ("limit", "") if len(ids) >= most else None


def _is_plain(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable()


def _hash(ids: Sequence[int]) -> int:
    return int.from_bytes(hashlib.blake2b(repr(list(ids)).encode(), digest_size=6).digest())


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix; the last token of a prompt is always evaluated."""
    n = 0
    for left, right in zip(one[:-1], other, strict=False):
        if left != right:
            break
        n += 1
    return n


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _refusal(message: str, kind: str) -> Response:
    return JSONResponse({"error": {"code": 400, "message": message, "type": kind}}, 400)
