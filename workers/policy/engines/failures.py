"""Failures of a call as the farm's errors: engine, failure and remedy.

Every server has its own wording of a 400 or 422; those of vLLM, SGLang, llama.cpp, transformers and OpenAI are
recognised.
"""

from __future__ import annotations

import json
import math
import re
import ssl
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2

from farm.errors import EngineError, FarmError, LimitReached
from farm.records.rollout import Outcome
from workers.policy.engines.connection import BUSY, OversizedAnswer
from workers.policy.generation import EngineBusy, EngineRefused, EngineUnfit

_FULL = re.compile(
    r"context[ _](?:length|size|window)|longer than the (?:maximum )?model|maximum input length"
    r"|max_tokens must be at least 1, got (?:0|-\d+)",
    re.I,
)
_SIZE = re.compile(r"context length (?:of|is) (\d+)", re.I)
_PROMPT = re.compile(r"(\d+) (?:input tokens|in the messages|tokens from the input)", re.I)
_NO_MODEL = re.compile(r"model[^.]{0,120}(?:does not exist|not found)|unknown model|model_not_found", re.I)
_NO_TOKEN = re.compile(r"out of vocabulary|out-of-vocabulary|vocab(?:ulary)? size|invalid tokens", re.I)
_NO_IMAGES = re.compile(
    r"at most \d+ image|not (?:a )?multi-?modal|multi-?modal[^.]{0,40}not (?:supported|enabled)"
    r"|image_url[^.]{0,60}(?:not supported|unsupported|not allowed)"
    r"|not support[^.]{0,20} (?:images?|vision|multi-?modal)|image input is not supported",
    re.I,
)
_BAD_IMAGE = re.compile(
    r"failed to (?:load|decode) (?:the )?image|cannot identify image|invalid image|image file is truncated", re.I
)
_UNKNOWN = re.compile(r"unexpected|unknown|unrecogni[sz]ed|unsupported|not support|not permitted|extra[ _]", re.I)
_MAX_DETAIL = 300


def detail(body: Any) -> str:
    """Return the answer's body as text, whatever its form."""
    return body if isinstance(body, str) else json.dumps(body, default=str)


def message_of(body: Any) -> str:
    """Return the human-readable message of a refusal; the whole body if it has none."""
    fields = body if isinstance(body, dict) else {}
    message = (_inner(fields) or fields).get("message")
    return message if isinstance(message, str) and message else detail(body)


def context_full(body: Any) -> bool:
    """Return whether the request did not fit into the engine's context."""
    if isinstance(body, dict) and "input_tokens" in (body.get("param"), (_inner(body) or {}).get("param")):
        return True
    return bool(_FULL.search(detail(body)))


def room(body: Any) -> int:
    """Return the tokens left for the answer, if the engine states its context and the prompt's length; else 0."""
    text = detail(body)
    size, prompt = _SIZE.search(text), _PROMPT.search(text)
    return max(0, int(size[1]) - int(prompt[1])) if size and prompt else 0


def no_model(body: Any) -> bool:
    """Return whether the engine does not have the requested model."""
    return bool(_NO_MODEL.search(detail(body)))


def no_images(body: Any) -> bool:
    """Return whether the engine's model supports no images, or fewer than the request has."""
    return bool(_NO_IMAGES.search(detail(body)))


def bad_image(body: Any) -> bool:
    """Return whether the engine cannot decode an image of the request."""
    return bool(_BAD_IMAGE.search(detail(body)))


def unknown_fields(body: Any, sent: frozenset[str]) -> bool:
    """Return whether the engine rejects any of the fields `sent`."""
    text = detail(body)
    return bool(_UNKNOWN.search(text)) and any(name in text for name in sent)


def _inner(body: dict[str, Any]) -> dict[str, Any] | None:
    error = body.get("error")
    return error if isinstance(error, dict) else None


class Unreadable(EngineError):
    """An answer that does not have the form that the wire defines."""


class NoRoute(EngineUnfit):
    """A server that lacks the requested route, or does not allow it, as with vLLM's 403."""


def refused(engine: str, status: int, headers: Mapping[str, str], body: Any) -> FarmError:
    """Return the error for an answer with an error status."""
    message = f"engine {engine} answered {status}: {message_of(body)[:_MAX_DETAIL]}"
    if status in BUSY:
        return EngineBusy(f"{message}; it is busy or paused: wait, or look at its log", retry_after_s(headers))
    if status in (400, 413, 422) and context_full(body):
        return LimitReached(Outcome.CONTEXT_FULL, message)
    if status == 401 or (status == 404 and no_model(body)):
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
    if status == 404 and no_model(body):
        return "it does not have this model: load it, or name one that it lists"
    if status in (404, 405):
        return "check the address (it ends in /v1) and the model's name"
    if _NO_TOKEN.search(detail(body)):
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
