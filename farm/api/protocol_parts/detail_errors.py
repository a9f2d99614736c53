"""Error responses in FastAPI's form, `{"detail": …}`, which most other systems' clients read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from farm.client import serialization
from farm.client.http_errors import ProblemDetails

_STATUS = {("NotAllowed", 403): 400, ("InvalidRequest", 400): 422}


def refuse_with_detail(problem: ProblemDetails, headers: Mapping[str, str] | None = None) -> Response:
    """Return the error response: the complaints by field for a refused body, else one text."""
    status = _STATUS.get((problem.kind, problem.status), problem.status)
    detail: Any = problem.message
    if problem.kind == "InvalidRequest" and problem.field:
        faults = [(problem.field, problem.message), *problem.more]
        detail = [{"type": "value_error", "loc": _place(field), "msg": message} for field, message in faults]
    return Response(serialization.written({"detail": detail}), status, headers, "application/json")


def _place(field: str) -> list[str]:
    return ["body"] if field in ("body", "request") else ["body", *field.split(".")]
