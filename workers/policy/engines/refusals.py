"""Parsing of an engine's 400 or 422: a full context, too large a `max_tokens`, or an unknown field.

Every server has its own wording; those of vLLM, SGLang, llama.cpp, transformers and OpenAI are recognised.
"""

from __future__ import annotations

import json
import re
from typing import Any

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


def no_token(body: Any) -> bool:
    """Return whether an id is not in the engine's vocabulary."""
    return bool(_NO_TOKEN.search(detail(body)))


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
