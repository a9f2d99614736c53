"""What is written down of a model call: the completion, when it was asked for, and how it was sampled."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from farm.request import SamplingParams
from farm.trajectory import Message, ModelCall
from workers.interfaces import Completion


class Stopwatch:
    """Knows when a call began, by the clock on the wall, and how long ago, by one that is never set."""

    def __init__(self) -> None:
        self.started_at = time.time()
        self._started = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started


def as_applied(sampling: SamplingParams, max_tokens: int) -> dict[str, Any]:
    """The sampling parameters of a call, as JSON; what was left to the engine is left out."""
    return {**sampling.model_dump(mode="json", exclude_none=True), "max_tokens": max_tokens}


def model_call(
    index: int, messages: Sequence[Message], completion: Completion, watch: Stopwatch, sampling: Mapping[str, Any]
) -> ModelCall:
    """The record of a call that was just answered; `messages` are those that are new since the one it continues."""
    return ModelCall(
        index=index,
        messages=list(messages),
        response=completion.message,
        finish_reason=completion.finish_reason,
        engine=completion.engine,
        started_at=watch.started_at,
        latency_s=watch.elapsed_s,
        n_prompt_tokens=completion.n_prompt_tokens,
        n_response_tokens=completion.n_response_tokens,
        policy_version=completion.policy_version,
        prompt_ids=completion.prompt_ids,
        response_ids=completion.response_ids,
        response_logprobs=completion.response_logprobs,
        sampling=dict(sampling),
        versions=completion.versions,
        stop_reason=completion.stop_reason,
        n_cached_tokens=completion.n_cached_tokens,
        n_invalid=completion.n_invalid,
        begins=completion.begins,
        mismatch=completion.mismatch,
    )
