"""vLLM's other control endpoints: tokens, load, metrics, aborts."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.doubles.double_machine import DoubleMachine
from tests.doubles.engine_metrics import PROMETHEUS, vllm_metrics
from workers.testing.engine.vllm.control import VllmControlEndpoints
from workers.testing.engine.web import Json, body_of, ids_of


class AllVllmControlEndpoints(VllmControlEndpoints):
    """`control` is False for a server outside development mode."""

    _machine: DoubleMachine

    def __init__(self, machine: DoubleMachine, *, version: str, control: bool) -> None:
        super().__init__(machine, version=version)
        self._control = control

    def routes(self) -> list[Route]:
        return super().routes() if self._control else self.open_routes()

    def open_routes(self) -> list[Route]:
        return [
            *super().open_routes(),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/load", self._load),
            Route("/metrics", self._metrics),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
        ]

    def control_routes(self) -> list[Route]:
        return [
            *super().control_routes(),
            Route("/abort_requests", self._abort, methods=["POST"]),
            Route("/get_world_size", self._world_size),
        ]

    async def _load(self, request: Request) -> Response:
        return Json({"server_load": len(self._scheduler.running) + len(self._scheduler.waiting)})

    async def _metrics(self, request: Request) -> Response:
        return Response(vllm_metrics(self._machine), media_type=PROMETHEUS)

    async def _tokenize(self, request: Request) -> Response:
        body = await body_of(request)
        vocabulary = self._machine.vocabulary
        ids = vocabulary.encode(self._text(body))
        strings = [vocabulary.shown_as[id_] for id_ in ids] if body.get("return_token_strs") else None
        return Json(
            {
                "count": len(ids),
                "max_model_len": self._machine.context_tokens,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    def _text(self, body: dict[str, Any]) -> str:
        if "messages" not in body:
            return str(body.get("prompt", ""))
        return self._machine.prompt_text(
            body["messages"],
            body.get("tools"),
            body.get("chat_template_kwargs"),
            generation_prompt=body.get("add_generation_prompt", True),
        )

    async def _detokenize(self, request: Request) -> Response:
        body = await body_of(request)
        ids = ids_of(body.get("tokens"), self._machine.vocabulary.size)
        return Json({"prompt": self._machine.vocabulary.decode(ids, special=True)})

    async def _abort(self, request: Request) -> Response:
        """Return the number of given ids, not of found ones, as vLLM does."""
        ids = (await body_of(request)).get("request_ids")
        n = self._scheduler.abort(lambda run: run.run_id in ids if ids else True)
        return Json({"status": "aborted", "aborted": len(ids) if ids else n})

    async def _world_size(self, request: Request) -> Response:
        return Json({"world_size": 1})
