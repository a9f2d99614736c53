"""A plain OpenAI-compatible server: text in, text out, without ids, log-probabilities or control endpoints."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.doubles.double_machine import DoubleMachine
from tests.doubles.vllm.sampling import CHAT, AllSamplingEndpoints
from workers.testing.engine.vllm.sampling import CREATED, error_response
from workers.testing.engine.web import Json, RequestRefused

OWNER = "test-double"
_NOT_HEEDED = frozenset(
    ("logprobs", "top_logprobs", "return_token_ids", "return_weight_versions", "return_prompt_text")
)


class OpenAIDouble:
    """vLLM's chat without its extensions."""

    paths = frozenset((CHAT,))

    def __init__(self, machine: DoubleMachine, *, stream_tokens: int) -> None:
        self._machine = machine
        self._sampling = _TextOnly(machine, versions=False, stream_tokens=stream_tokens, tokens_in=False)

    def routes(self) -> list[Route]:
        chat = next(route for route in self._sampling.routes() if route.path == CHAT)
        return [chat, Route("/v1/models", self._models)]

    @staticmethod
    def error(refused: RequestRefused) -> Response:
        return error_response(refused)

    async def _models(self, request: Request) -> Response:
        card = {"id": self._machine.name, "object": "model", "created": CREATED, "owned_by": OWNER}
        return Json({"object": "list", "data": [card]})


class _TextOnly(AllSamplingEndpoints):
    async def _body(self, request: Request) -> dict[str, Any]:
        body = await super()._body(request)
        return {name: value for name, value in body.items() if name not in _NOT_HEEDED}
