"""Minimal model calls."""

from __future__ import annotations

from typing import Any

from farm.records.trajectory import ModelCall


def model_call(index: int = 0, **fields: Any) -> ModelCall:
    """Return a text-only call, with one token in and one out, except for the given fields."""
    least: dict[str, Any] = {
        "messages": [],
        "response": {"role": "assistant"},
        "finish_reason": "stop",
        "engine": "http://e/v1",
        "started_at": 0.0,
        "latency_s": 0.1,
        "n_prompt_tokens": 1,
        "n_response_tokens": 1,
    }
    return ModelCall(index=index, **(least | fields))
