"""The record of a model call, and the detection of a policy that repeats itself.

A repetition is consecutive turns with equal requests and equal answers. Turns are compared by their calls (names, and
arguments as JSON), or by their text if they have none, and by the texts of the answers. Text next to calls, and ids of
calls, are ignored.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from farm.records.request import SamplingParams
from farm.records.trajectory import Message, ModelCall, field_values
from workers.plugins.interfaces import Completion

N_ALTERNATING = 6
"""Number of consecutive turns of two alternating kinds (A B A B A B) that also count as a repetition."""


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


class RepeatedTurns:
    """The last turns of one conversation, as digests. `most` is `Limits.max_repeats`."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._last: deque[bytes] = deque(maxlen=max(most or 0, N_ALTERNATING))

    def repeat_with(self, answer: Message, observations: Iterable[str]) -> bool:
        """Add a completed turn; return whether it reaches the limit. Always False without a limit."""
        if self._most is None:
            return False
        self._last.append(_digest(answer, observations))
        return _repeat(reversed(self._last), self._most)


def conversation_repeats(messages: Sequence[Message], most: int | None) -> bool:
    """Return whether the last turns of a conversation, as sent by a program, reach the limit.

    An answer followed by another answer, or by nothing, is ignored: it is a part of a turn, or incomplete. Reads
    backwards only as long as turns are equal.
    """
    return most is not None and _repeat(_newest_first(messages), most)


def _newest_first(messages: Sequence[Message]) -> Iterator[bytes]:
    observations: list[str] = []
    for message in reversed(messages):
        if message.get("role") != "assistant":
            observations.append(text_of(message))
        elif observations:
            yield _digest(message, reversed(observations))
            observations = []


def _repeat(newest_first: Iterable[bytes], most: int) -> bool:
    last: bytes | None = None
    before: bytes | None = None
    for n, turn in enumerate(newest_first, start=1):
        if n == 1:
            last = turn
        elif n == 2:
            before = turn
        elif turn != (last if n % 2 else before):
            return False
        if n >= (most if last == before else N_ALTERNATING):
            return True
    return False


def _digest(answer: Message, observations: Iterable[str]) -> bytes:
    functions = [call.get("function") or {} for call in answer.get("tool_calls") or []]
    calls = [[each.get("name") or "", _arguments(each.get("arguments") or "")] for each in functions]
    turn = calls or text_of(answer).strip()
    return hashlib.blake2b(json.dumps([turn, *observations]).encode(), digest_size=16).digest()


def _arguments(text: str) -> str:
    """Return arguments with sorted keys and without blanks; a text that is not JSON is unchanged."""
    try:
        return json.dumps(json.loads(text or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return text


def text_of(message: Message) -> str:
    """Return the text of a message; content that is a list of parts becomes JSON."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else json.dumps(content, default=str)
