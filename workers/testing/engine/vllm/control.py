"""What vLLM lets be asked and told besides: models, tokens, health, pauses, weights, the prefix cache."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from workers.testing.engine.asked import Refused, ids_of
from workers.testing.engine.machine import Machine
from workers.testing.engine.metrics import PROMETHEUS, vllm_metrics
from workers.testing.engine.vllm.sampling import OWNER
from workers.testing.engine.vllm.telling import CREATED
from workers.testing.engine.web import Json, body_of

_PAUSE_MODES = ("abort", "wait", "keep")


class ControlEndpoints:
    """Some of them vLLM has only with VLLM_SERVER_DEV_MODE=1; `control` says whether they are there."""

    def __init__(self, machine: Machine, *, version: str, control: bool) -> None:
        self._machine = machine
        self._scheduler = machine.scheduler
        self._version = version
        self._control = control

    def routes(self) -> list[Route]:
        always = [
            Route("/health", self._health),
            Route("/ping", self._health, methods=["GET", "POST"]),
            Route("/version", self._say_version),
            Route("/load", self._load),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
        ]
        return always + self._control_routes() if self._control else always

    def _control_routes(self) -> list[Route]:
        return [
            Route("/pause", self._pause, methods=["POST"]),
            Route("/resume", self._resume, methods=["POST"]),
            Route("/is_paused", self._is_paused),
            Route("/abort_requests", self._abort, methods=["POST"]),
            Route("/update_weight_version", self._update_version, methods=["POST"]),
            Route("/weight_info", self._weight_info),
            Route("/reset_prefix_cache", self._reset_cache, methods=["POST"]),
            Route("/get_world_size", self._world_size),
        ]

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self._machine.healthy else 503)

    async def _say_version(self, request: Request) -> Response:
        return Json({"version": self._version})

    async def _load(self, request: Request) -> Response:
        return Json({"server_load": len(self._scheduler.running) + len(self._scheduler.waiting)})

    async def _metrics(self, request: Request) -> Response:
        return Response(vllm_metrics(self._machine), media_type=PROMETHEUS)

    async def _models(self, request: Request) -> Response:
        permission = {
            "id": "modelperm-0",
            "object": "model_permission",
            "created": CREATED,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {
            "id": self._machine.name,
            "object": "model",
            "created": CREATED,
            "owned_by": OWNER,
            "root": str(self._machine.root),
            "parent": None,
            "max_model_len": self._machine.context_tokens,
            "permission": [permission],
        }
        return Json({"object": "list", "data": [card]})

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

    async def _pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in _PAUSE_MODES:
            raise Refused(f"no such mode: {mode!r}", kind="Bad Request", param="query.mode")
        clear_cache = request.query_params.get("clear_cache", "true").lower() not in ("false", "0")
        await self._scheduler.pause(mode, clear_cache=clear_cache)
        return Json({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        self._scheduler.resume()
        return Json({"status": "resumed"})

    async def _is_paused(self, request: Request) -> Response:
        return Json({"is_paused": bool(self._scheduler.paused)})

    async def _abort(self, request: Request) -> Response:
        """Counts the ids that were given, not those that were found, as vLLM does."""
        ids = (await body_of(request)).get("request_ids")
        n = self._scheduler.abort(lambda run: run.run_id in ids if ids else True)
        return Json({"status": "aborted", "aborted": len(ids) if ids else n})

    async def _update_version(self, request: Request) -> Response:
        self._scheduler.version = str((await body_of(request))["new_version"])
        return Json({"success": True, "new_version": self._scheduler.version})

    async def _weight_info(self, request: Request) -> Response:
        return Json({"weight_version": self._scheduler.version})

    async def _reset_cache(self, request: Request) -> Response:
        self._scheduler.cache.clear()
        return Json({"success": True})

    async def _world_size(self, request: Request) -> Response:
        return Json({"world_size": 1})
