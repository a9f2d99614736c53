"""A plain OpenAI-compatible server: text in, text out, no ids, no log-probabilities, and nothing to control it by."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from workers.testing.engine.asked import Refused
from workers.testing.engine.machine import Machine
from workers.testing.engine.vllm.sampling import SamplingEndpoints
from workers.testing.engine.vllm.telling import CREATED
from workers.testing.engine.vllm.wire import VllmWire
from workers.testing.engine.web import Json

OWNER = "test-double"
CHAT = "/v1/chat/completions"
_NOT_HEEDED = frozenset(
    ("logprobs", "top_logprobs", "return_token_ids", "return_weight_versions", "return_prompt_text")
)


class OpenAIWire:
    """The chat of vLLM, less all that is vLLM's own."""

    paths = frozenset((CHAT,))

    def __init__(self, machine: Machine, *, stream_tokens: int) -> None:
        self._machine = machine
        self._sampling = _TextOnly(machine, versions=False, stream_tokens=stream_tokens, tokens_in=False)

    def routes(self) -> list[Route]:
        chat = next(route for route in self._sampling.routes() if route.path == CHAT)
        return [chat, Route("/v1/models", self._models)]

    @staticmethod
    def error(refused: Refused) -> Response:
        return VllmWire.error(refused)

    async def _models(self, request: Request) -> Response:
        card = {"id": self._machine.name, "object": "model", "created": CREATED, "owned_by": OWNER}
        return Json({"object": "list", "data": [card]})


class _TextOnly(SamplingEndpoints):
    async def _body(self, request: Request) -> dict[str, Any]:
        body = await super()._body(request)
        return {name: value for name, value in body.items() if name not in _NOT_HEEDED}
