"""Model calls with the least that each must have."""

from __future__ import annotations

from typing import Any

from farm.records.trajectory import ModelCall


def model_call(index: int = 0, **fields: Any) -> ModelCall:
    """Return a call of text alone, one token in and one out, but for the fields that are given."""
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
