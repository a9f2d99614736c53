"""The engine double: the wire format of vLLM, SGLang, a plain OpenAI server or ProRL's, with the faults of a real one.

It is the counterpart of the farm's everyday tests. So its connections can be cut and it can be made to fail; and it
shares no code with the code under test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.doubles.double_machine import DoubleMachine
from tests.doubles.fault_middleware import ApiKeyMiddleware, FaultMiddleware
from tests.doubles.faults import Faults, NoSuchFault
from tests.doubles.openai_wire import OpenAIDouble
from tests.doubles.prorl_wire import ProrlDouble
from tests.doubles.sglang.wire import SglangDouble
from tests.doubles.vllm.wire import VllmDouble
from workers.testing.engine.scripted_engine import ScriptedEngine
from workers.testing.engine.web import Json, RequestRefused, body_of
from workers.testing.scripted_model import Script

Wire = Literal["vllm", "sglang", "openai", "prorl"]


class EngineDouble(ScriptedEngine):
    """A scripted engine with faults. `options` are those of ScriptedEngine.

    `version` is vLLM's: before 0.33 calls wait during a pause, and completions and chat do not report weight versions.
    `scale_out` and `control` are flags that a vLLM may lack. `key` is the API key that it requires. With `images` its
    chat accepts images, as vLLM's does.
    """

    machine_type = DoubleMachine
    machine: DoubleMachine

    def __init__(
        self,
        script: Script | None = None,
        *,
        wire: Wire = "vllm",
        faults: Mapping[str, float] | None = None,
        retry_after_s: float = 1.0,
        slow_s: float = 1.0,
        version: str = "0.33.0",
        scale_out: bool = True,
        control: bool = True,
        key: str = "",
        images: bool = False,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(script, seed=seed, **options)
        self.faults = self.machine.faults = Faults(faults, seed=seed, retry_after_s=retry_after_s, slow_s=slow_s)
        self.machine.takes_images = images
        self._key = key
        self._wire: _Wire
        if wire == "sglang":
            self._wire = SglangDouble(self.machine, stream_tokens=self.stream_tokens)
        elif wire == "openai":
            self._wire = OpenAIDouble(self.machine, stream_tokens=self.stream_tokens)
        elif wire == "prorl":
            self._wire = ProrlDouble(self.machine)
        else:
            self._wire = VllmDouble(
                self.machine, version=version, scale_out=scale_out, control=control, stream_tokens=self.stream_tokens
            )

    def app(self) -> Starlette:
        """Return its web application; its faults need a server such as `workers.testing.serving`."""
        app = super().app()
        app.add_exception_handler(NoSuchFault, self._refuse_fault)
        app.user_middleware += [Middleware(ApiKeyMiddleware, key=self._key)] if self._key else []
        app.user_middleware += [
            Middleware(FaultMiddleware, faults=self.faults, paths=self._wire.paths, error=self._wire.error)
        ]
        return app

    def routes(self) -> Sequence[Route]:
        return [*self._wire.routes(), Route("/double/faults", self._set_faults, methods=["POST"])]

    def error(self, refused: RequestRefused) -> Response:
        return self._wire.error(refused)

    def fail_next(self, kind: str, n: int = 1) -> None:
        """Inject a fault into the next n sampling calls. Raises NoSuchFault."""
        self.faults.fail_next(kind, n)

    async def _set_faults(self, request: Request) -> Response:
        """Read `next` and `rates` by kind; `clear`, which removes all first; `healthy`."""
        body = await body_of(request)
        if body.get("clear"):
            self.faults.clear()
        if "rates" in body:
            self.faults.set_rates(body["rates"])
        for kind, n in body.get("next", {}).items():
            self.faults.fail_next(kind, n)
        self.healthy = bool(body.get("healthy", self.healthy))
        return Json({"struck": dict(self.faults.n_struck), "healthy": self.healthy})

    async def _refuse_fault(self, request: Request, error: Exception) -> Response:
        return self.error(RequestRefused(str(error)))


class _Wire(Protocol):
    """`paths` are those that can have faults."""

    paths: frozenset[str]

    def routes(self) -> list[Route]: ...

    def error(self, refused: RequestRefused) -> Response: ...
