"""Why a request is not answered, in the words of its API, and with what a client is to make of it."""

from __future__ import annotations

import logging
from typing import Any

import orjson
from starlette.responses import Response

from farm.errors import LimitReached, RolloutError, StaleRollout
from farm.rollout import Outcome
from workers.policy.gateway.bodies import MAX_BODY_BYTES, Crowded, TooLarge
from workers.policy.gateway.chat import ChatApi
from workers.policy.gateway.wire import Api, BadRequest, Problem

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1

# clients know by these words what to do, some by those of one vendor and some by those of the other
_FULL = "This model's maximum context length is exceeded by the conversation: shorten it"


def problem_of(error: Exception) -> Problem:
    """What a client is told: not where engines are. Of 503 it should try again; of none of the others."""
    if isinstance(error, BadRequest):
        return Problem(400, "invalid_request", str(error), error.param)
    if isinstance(error, TooLarge):
        return Problem(413, "request_too_large", f"a request may have {MAX_BODY_BYTES} bytes, and not as many objects")
    if isinstance(error, Crowded):
        return Problem(503, "overloaded", "too much is asked at once", retry_after_s=_RETRY_AFTER_S)
    if isinstance(error, LimitReached) and error.outcome is Outcome.CONTEXT_FULL:
        return Problem(400, "context_length_exceeded", _FULL, "messages")
    if isinstance(error, LimitReached | StaleRollout):
        # not 400 or 429, which agents have been seen to try again
        return Problem(403, "rollout_ended", "the limits of this run are used up: no request is answered any more")
    if isinstance(error, RolloutError) and error.retryable:
        return Problem(503, "engine_error", "the model cannot be reached now", retry_after_s=_RETRY_AFTER_S)
    if isinstance(error, RolloutError):
        return Problem(400, "engine_refused", "the model does not take this request")
    log.error("a model call broke", exc_info=error)
    return Problem(500, "internal_error", f"answering broke: {type(error).__name__}")


def refusal(api: Api, problem: Problem) -> Response:
    headers = {"x-should-retry": "true" if problem.status == 503 else "false"}
    if problem.retry_after_s is not None:
        headers["retry-after"] = str(problem.retry_after_s)
    return json_response(api.problem(problem), problem.status, headers)


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, "application/json")


class _Any(ChatApi):
    """For answers of which it is not known which API the client speaks: a body that each of them can read."""

    def problem(self, problem: Problem) -> dict[str, Any]:
        return {"type": "error", **super().problem(problem)}


ANY = _Any()
