"""SGLang's wire, as far as the double speaks it.

Unlike vLLM it gives log-probabilities from after the temperature, lets calls wait during a pause, refuses a call whose
`max_new_tokens` does not fit, and cuts what runs when the weights are given a name, unless told not to.
"""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import Route

from workers.testing.engine.asked import Refused
from workers.testing.engine.machine import Machine
from workers.testing.engine.sglang.chat import ChatEndpoint
from workers.testing.engine.sglang.control import ControlEndpoints
from workers.testing.engine.sglang.generate import GenerateEndpoint
from workers.testing.engine.web import Json

PATHS = ("/generate", "/v1/chat/completions")


class SglangWire:
    """`stream_tokens` is how many ids an event adds."""

    paths = frozenset(PATHS)

    def __init__(self, machine: Machine, *, stream_tokens: int) -> None:
        self._generate = GenerateEndpoint(machine, stream_tokens=stream_tokens)
        self._chat = ChatEndpoint(machine)
        self._control = ControlEndpoints(machine)

    def routes(self) -> list[Route]:
        generate, chat = PATHS
        return [
            Route(generate, self._generate.generate, methods=["POST", "PUT"]),
            Route(chat, self._chat.chat, methods=["POST"]),
            *self._control.routes(),
        ]

    @staticmethod
    def error(refused: Refused) -> Response:
        """Flat on the routes of OpenAI's shape, nested on its own; the flat one is understood by both."""
        flat = {
            "object": "error",
            "message": str(refused),
            "type": refused.kind,
            "param": refused.param,
            "code": refused.status,
        }
        return Json({**flat, "error": {"message": str(refused)}}, refused.status)
