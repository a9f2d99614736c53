"""SGLang's control endpoints: pauses, aborts, the weights' version, its cache, health and models."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.doubles.double_machine import DoubleMachine
from tests.doubles.engine_metrics import PROMETHEUS, sglang_metrics
from tests.doubles.vllm.sampling import FINGERPRINT
from workers.testing.engine.vllm.sampling import CREATED
from workers.testing.engine.web import Json, RequestRefused, body_of

VERSION = "0.5.23"
OWNER = "sglang-test-double"
_PAUSE_MODES = {"abort": "abort", "retract": "keep", "in_place": "keep"}


class SglangControlEndpoints:
    def __init__(self, machine: DoubleMachine) -> None:
        self._machine = machine
        self._scheduler = machine.scheduler

    def routes(self) -> list[Route]:
        posts = {
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/abort_request": self._abort,
            "/update_weight_version": self._update_version,
            "/update_weights_from_disk": self._update_from_disk,
        }
        gets = {
            "/health": self._ready,
            "/health_generate": self._ready,
            "/ready": self._ready,
            "/model_info": self._model_info,
            "/get_model_info": self._model_info,
            "/server_info": self._server_info,
            "/get_server_info": self._server_info,
            "/v1/models": self._models,
            "/metrics": self._metrics,
        }
        return [
            Route("/flush_cache", self._flush, methods=["GET", "POST"]),
            *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
            *(Route(path, endpoint) for path, endpoint in gets.items()),
        ]

    async def _pause(self, request: Request) -> Response:
        mode = (await body_of(request)).get("mode", "abort")
        if mode not in _PAUSE_MODES:
            raise RequestRefused(f"no such mode: {mode!r}")
        await self._scheduler.pause(_PAUSE_MODES[mode], clear_cache=False)
        return Json({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: Request) -> Response:
        await body_of(request)
        self._scheduler.resume()
        return Json({"message": "Generation continued successfully.", "status": "ok"})

    async def _abort(self, request: Request) -> Response:
        """Abort calls by the prefix of their id."""
        body = await body_of(request)
        rid, everything = body.get("rid") or "", bool(body.get("abort_all"))
        self._scheduler.abort(lambda run: everything or bool(rid and run.run_id.startswith(rid)))
        return Response()

    async def _update_version(self, request: Request) -> Response:
        body = await body_of(request)
        if body.get("abort_all_requests", True):
            self._scheduler.abort(lambda run: True)
        self._scheduler.version = str(body["new_version"])
        return Json({"success": True, "message": "Weight version updated", "new_version": self._scheduler.version})

    async def _update_from_disk(self, request: Request) -> Response:
        """Record the path, as the double has no weights."""
        body = await body_of(request)
        self._machine.loaded.append(str(body["model_path"]))
        return Json({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    async def _flush(self, request: Request) -> Response:
        if self._scheduler.running or self._scheduler.waiting:
            return Response("Flush cache failed: requests are running or waiting.\n", 400)
        self._scheduler.cache.clear()
        return Response("Cache flushed.\n")

    async def _ready(self, request: Request) -> Response:
        """/health requests a token, which a pause blocks until the request fails; the double fails at once."""
        return Response(status_code=200 if self._machine.healthy and not self._scheduler.paused else 503)

    async def _model_info(self, request: Request) -> Response:
        return Json(
            {
                "model_path": str(self._machine.root),
                "tokenizer_path": str(self._machine.root),
                "is_generation": True,
                "preferred_sampling_params": "",
                "weight_version": self._scheduler.version,
                "model_type": FINGERPRINT,
            }
        )

    async def _server_info(self, request: Request) -> Response:
        return Json(
            {
                "model_path": str(self._machine.root),
                "served_model_name": self._machine.name,
                "context_length": self._machine.context_tokens,
                "version": VERSION,
                "internal_states": [{"weight_version": self._scheduler.version}],
            }
        )

    async def _models(self, request: Request) -> Response:
        card = {
            "id": self._machine.name,
            "object": "model",
            "created": CREATED,
            "owned_by": OWNER,
            "root": str(self._machine.root),
            "parent": None,
            "max_model_len": self._machine.context_tokens,
        }
        return Json({"object": "list", "data": [card]})

    async def _metrics(self, request: Request) -> Response:
        return Response(sglang_metrics(self._machine), media_type=PROMETHEUS)
