"""Error responses: exceptions as errors of the client's API, with a status that tells whether to retry."""

from __future__ import annotations

import logging
from typing import Any

import orjson
from starlette.responses import Response

from farm.errors import LimitReached, RolloutError, StaleRollout
from farm.records.rollout import Outcome
from workers.policy.gateway.dialects.chat_completions import ChatApi
from workers.policy.gateway.dialects.model_api import Api, ApiProblem, BadRequest
from workers.policy.gateway.request_limits import MAX_BODY_BYTES, BodyTooLarge, TooManyRequests

log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1

# Clients recognise the error by these words, some by one vendor's, some by another's.
_FULL = "This model's maximum context length is exceeded by the conversation: shorten it"


def problem_of(error: Exception) -> ApiProblem:
    """Return the error for the client, without engine addresses. Only a 503 should be retried."""
    if isinstance(error, BadRequest):
        return ApiProblem(error.status, "invalid_request", str(error), error.param, details=error.details)
    if isinstance(error, BodyTooLarge):
        return ApiProblem(
            413, "request_too_large", f"a request may have {MAX_BODY_BYTES} bytes, and not as many objects"
        )
    if isinstance(error, TooManyRequests):
        return ApiProblem(503, "overloaded", "too many requests at once", retry_after_s=_RETRY_AFTER_S)
    if isinstance(error, LimitReached) and error.outcome is Outcome.CONTEXT_FULL:
        return ApiProblem(400, "context_length_exceeded", _FULL, "messages")
    if isinstance(error, LimitReached | StaleRollout):
        # Not 400 or 429: some agents retry those.
        return ApiProblem(403, "rollout_ended", "the limits of this run are reached: no further request is answered")
    if isinstance(error, RolloutError) and error.retryable:
        return ApiProblem(503, "engine_error", "the model is not reachable now", retry_after_s=_RETRY_AFTER_S)
    if isinstance(error, RolloutError):
        return ApiProblem(400, "engine_refused", "the model refuses this request")
    log.error("Model call failed", exc_info=error)
    return ApiProblem(500, "internal_error", f"answering broke: {type(error).__name__}")


def forget_frames(error: BaseException | None) -> None:
    """Drop an error's frames, which hold its request: errors of unanswered calls are kept until the rollout ends."""
    while error is not None:
        error.__traceback__, error = None, error.__cause__ or error.__context__


def refusal(api: Api, problem: ApiProblem) -> Response:
    headers = {"x-should-retry": "true" if problem.status == 503 else "false"}
    if problem.retry_after_s is not None:
        headers["retry-after"] = str(problem.retry_after_s)
    return json_response(api.problem(problem), problem.status, headers)


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, "application/json")


class _Any(ChatApi):
    """The API of a client with an unknown protocol: error bodies that clients of each API can read."""

    def problem(self, problem: ApiProblem) -> dict[str, Any]:
        return {"type": "error", **super().problem(problem)}


ANY = _Any()
