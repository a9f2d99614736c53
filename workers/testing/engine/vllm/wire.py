"""All of vLLM's wire that the double speaks."""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import Route

from workers.testing.engine.asked import Refused
from workers.testing.engine.machine import Machine
from workers.testing.engine.vllm.control import ControlEndpoints
from workers.testing.engine.vllm.sampling import PATHS, SamplingEndpoints
from workers.testing.engine.web import Json


class VllmWire:
    """`version` decides what is told of weights, and what a pause does to new calls: 0.33 changed both."""

    paths = frozenset(PATHS)

    def __init__(self, machine: Machine, *, version: str, scale_out: bool, control: bool, stream_tokens: int) -> None:
        major, minor = (int(part) for part in version.split(".")[:2])
        self._sampling = SamplingEndpoints(
            machine, versions=(major, minor) >= (0, 33), stream_tokens=stream_tokens, tokens_in=scale_out
        )
        self._control = ControlEndpoints(machine, version=version, control=control)

    def routes(self) -> list[Route]:
        return [*self._sampling.routes(), *self._control.routes()]

    @staticmethod
    def error(refused: Refused) -> Response:
        error = {"message": str(refused), "type": refused.kind, "param": refused.param, "code": refused.status}
        return Json({"error": error}, refused.status)
