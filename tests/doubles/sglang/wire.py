"""SGLang's wire format, as far as the double implements it.

Unlike vLLM it returns log-probabilities after the temperature, lets calls wait during a pause, refuses a call whose
`max_new_tokens` does not fit, and aborts running calls when a weights version is set, unless the order says otherwise.
"""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import Route

from tests.doubles.double_machine import DoubleMachine
from tests.doubles.sglang.chat import ChatEndpoint
from tests.doubles.sglang.control import SglangControlEndpoints
from tests.doubles.sglang.generate import GenerateEndpoint
from workers.testing.engine.web import Json, RequestRefused

PATHS = ("/generate", "/v1/chat/completions")


class SglangDouble:
    """`stream_tokens` is the number of ids per event."""

    paths = frozenset(PATHS)

    def __init__(self, machine: DoubleMachine, *, stream_tokens: int) -> None:
        self._generate = GenerateEndpoint(machine, stream_tokens=stream_tokens)
        self._chat = ChatEndpoint(machine)
        self._control = SglangControlEndpoints(machine)

    def routes(self) -> list[Route]:
        generate, chat = PATHS
        return [
            Route(generate, self._generate.generate, methods=["POST", "PUT"]),
            Route(chat, self._chat.chat, methods=["POST"]),
            *self._control.routes(),
        ]

    @staticmethod
    def error(refused: RequestRefused) -> Response:
        """Return the error in both forms: flat as on the OpenAI routes, nested as on its own."""
        flat = {
            "object": "error",
            "message": str(refused),
            "type": refused.kind,
            "param": refused.param,
            "code": refused.status,
        }
        return Json({**flat, "error": {"message": str(refused)}}, refused.status)
