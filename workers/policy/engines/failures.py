"""Failures of a call as the farm's errors: engine, failure and remedy."""

from __future__ import annotations

import math
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2

from farm.errors import EngineError, FarmError, LimitReached
from farm.records.rollout import Outcome
from workers.policy.engines import refusals
from workers.policy.engines.connection import BUSY, OversizedAnswer
from workers.policy.generation import EngineBusy, EngineRefused, EngineUnfit

_MAX_DETAIL = 300


class Unreadable(EngineError):
    """An answer that does not have the form that the wire defines."""


class NoRoute(EngineUnfit):
    """A server that lacks the requested route, or does not allow it, as with vLLM's 403."""


def refused(engine: str, status: int, headers: Mapping[str, str], body: Any) -> FarmError:
    """Return the error for an answer with an error status."""
    message = f"engine {engine} answered {status}: {refusals.message_of(body)[:_MAX_DETAIL]}"
    if status in BUSY:
        return EngineBusy(f"{message}; it is busy or paused: wait, or look at its log", retry_after_s(headers))
    if status in (400, 413, 422) and refusals.context_full(body):
        return LimitReached(Outcome.CONTEXT_FULL, message)
    if status == 401 or (status == 404 and refusals.no_model(body)):
        return EngineUnfit(f"{message}; {_advice(status, body)}")
    if status in (403, 404, 405):
        return NoRoute(f"{message}; {_advice(status, body)}")
    if 300 <= status < 400:
        elsewhere = headers.get("location", "somewhere else")[:_MAX_DETAIL]
        return EngineError(f"engine {engine} answered {status}, it is at {elsewhere}: name that address")
    if 400 <= status < 500 and status != 408:
        return EngineRefused(f"{message}; {_advice(status, body)}")
    return EngineError(f"{message}; it is broken: look at its log")


def _advice(status: int, body: Any) -> str:
    if status in (401, 403):
        return "check the engine's API key, and that it allows this request"
    if status == 404 and refusals.no_model(body):
        return "it does not have this model: load it, or name one that it lists"
    if status in (404, 405):
        return "check the address (it ends in /v1) and the model's name"
    if refusals.no_token(body):
        return "the tokenizer is not this model's: give the engine's own"
    return "it refuses the request: check the sampling parameters and that it allows tools"


def broken(engine: str, error: BaseException) -> EngineError:
    """Return the error for an exception of the HTTP client."""
    if isinstance(error, OversizedAnswer):
        what = f"{error}; nothing of it is kept, look at its log"
    elif isinstance(error, (httpx2.TimeoutException, TimeoutError)):
        what = "did not answer in time; look at its load, or raise FARM_POLICY_TIMEOUT_S"
    elif isinstance(error, (httpx2.ConnectError, httpx2.UnsupportedProtocol, httpx2.InvalidURL, ssl.SSLError)):
        what = f"cannot be reached ({error or type(error).__name__}); is it running, and is the address right?"
    else:
        what = f"broke off before it had answered ({str(error) or type(error).__name__}); look at its log"
    return EngineError(f"engine {engine} {what}")


def unreadable(engine: str, error: Exception) -> Unreadable:
    """Return the error for an exception on parsing an answer."""
    message = str(error) if type(error) is ValueError else repr(error)
    return Unreadable(
        f"engine {engine} gave an answer that does not add up ({message}); nothing of it is kept. Check that it is the "
        "kind of server it was registered as, and look at its log"
    )


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of `Retry-After`, which is a number or an HTTP date; None if it is missing or unreadable."""
    text = headers.get("retry-after", "").strip()
    try:
        seconds = float(text)
    except ValueError:
        seconds = _until(text)
    return max(0.0, seconds) if math.isfinite(seconds) else None


def _until(text: str) -> float:
    try:
        instant = parsedate_to_datetime(text)
    except ValueError:
        return math.nan
    return (instant.replace(tzinfo=instant.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
