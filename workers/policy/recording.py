"""The record of a model call: the completion, the time of its request, and its sampling parameters."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from farm.records.request import SamplingParams
from farm.records.trajectory import Message, ModelCall, field_values
from workers.plugins.interfaces import Completion


class Stopwatch:
    """The start of a call by the wall clock, and its duration by the monotonic clock."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self._started = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started


def as_applied(sampling: SamplingParams, max_tokens: int) -> dict[str, Any]:
    """Return the sampling parameters of a call as JSON, without those left to the engine."""
    return {**sampling.model_dump(mode="json", exclude_none=True), "max_tokens": max_tokens}


def model_call(
    index: int,
    messages: Sequence[Message],
    completion: Completion,
    watch: Stopwatch,
    sampling: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]],
    images: Sequence[str] = (),
) -> ModelCall:
    """Return the record of a call that was just answered with these tools; `messages` are the new ones since the call
    that it continues, `images` the digests of all images of its conversation.
    """
    return ModelCall(
        **field_values(completion, Completion),
        index=index,
        messages=list(messages),
        started_at=watch.started_at,
        latency_s=watch.elapsed_s,
        sampling=dict(sampling),
        tools=[dict(tool) for tool in tools],
        images=tuple(images),
    )
