"""vLLM's wire format, as far as the double implements it."""

from __future__ import annotations

from starlette.responses import Response
from starlette.routing import Route

from tests.doubles.double_machine import DoubleMachine
from tests.doubles.vllm.control import AllVllmControlEndpoints
from tests.doubles.vllm.sampling import PATHS, AllSamplingEndpoints
from workers.testing.engine.vllm.sampling import error_response
from workers.testing.engine.web import RequestRefused


class VllmDouble:
    """`version` determines what is reported of weights, and how a pause affects new calls: 0.33 changed both."""

    paths = frozenset(PATHS)

    def __init__(
        self, machine: DoubleMachine, *, version: str, scale_out: bool, control: bool, stream_tokens: int
    ) -> None:
        major, minor = (int(part) for part in version.split(".")[:2])
        self._sampling = AllSamplingEndpoints(
            machine, versions=(major, minor) >= (0, 33), stream_tokens=stream_tokens, tokens_in=scale_out
        )
        self._control = AllVllmControlEndpoints(machine, version=version, control=control)

    def routes(self) -> list[Route]:
        return [*self._sampling.routes(), *self._control.routes()]

    @staticmethod
    def error(refused: RequestRefused) -> Response:
        return error_response(refused)
