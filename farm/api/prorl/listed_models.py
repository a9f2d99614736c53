"""The check that an LLM server lists a model, for jobs that name none."""

from __future__ import annotations

import time
from functools import lru_cache

import httpx2

from farm.engine_urls import normal_url
from farm.errors import InvalidRequest

_ASK_S = 3.0
_KNOWN_S = 30.0
"""Seconds until a server that passed the check is asked again."""


def check_lists_models(server: str, key: str | None) -> None:
    """Raise InvalidRequest if a server answers and lists no model.

    A server that is unreachable from here may be reachable from the nodes, or may be about to start.
    """
    _ask(server, key, int(time.monotonic() / _KNOWN_S))


@lru_cache(256)
def _ask(server: str, key: str | None, period: int) -> None:
    """As `check_lists_models`, with cached successes; errors are not cached."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx2.get(f"{normal_url(server)}/models", headers=headers, timeout=_ASK_S)
    except httpx2.HTTPError:
        return
    if answer.status_code in (404, 405) or (answer.status_code == 200 and not _lists_any(answer)):
        wanted = f"is missing, and LLM server {server} lists no model: name the one that it serves"
        raise InvalidRequest(wanted, field="sampling_params.model")


def _lists_any(answer: httpx2.Response) -> bool:
    try:
        return bool(answer.json()["data"])
    except (ValueError, KeyError, TypeError):
        return False
