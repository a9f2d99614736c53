"""What the agent did, in tokens: model calls, and the training rows (segments) that follow from them.

Token ids are the trajectory; text is for people. A call whose prompt begins with all the ids of an earlier call
continues that call's segment: the ids in between were put there (mask 0). A call that continues nothing starts a new
segment. So a rollout is 0..N training rows, and nothing sampled is ever tokenised again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Message: TypeAlias = dict[str, Any]
"""A chat message as the OpenAI API writes it: role, content, and tool_calls or tool_call_id."""

TokenIds: TypeAlias = NDArray[np.int32]
LogProbs: TypeAlias = NDArray[np.float32]
Mask: TypeAlias = NDArray[np.uint8]

NO_VERSION = -1
"""The policy version of a token nobody sampled, or of a call whose engine does not say."""


def token_ids(values: Sequence[int] | TokenIds) -> TokenIds:
    """int32 [n]."""
    return np.asarray(values, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call the policy asked for; `arguments` is the raw text it sampled, which may not be JSON."""

    call_id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ModelCall:
    """One request to an LLM, recorded as it happens.

    `messages` are only those added since the call before; `observations` are the tool results that answered it.
    `prompt_ids` [n_prompt], `response_ids` and `response_logprobs` [n_response]; None where the engine gives no ids.
    """

    index: int
    messages: list[Message]
    response: Message
    finish_reason: str
    engine: str
    started_at: float
    latency_s: float
    n_prompt_tokens: int
    n_response_tokens: int
    policy_version: str = ""
    prompt_ids: TokenIds | None = None
    response_ids: TokenIds | None = None
    response_logprobs: LogProbs | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    observations: list[Message] = field(default_factory=list)

    @property
    def token_exact(self) -> bool:
        """Whether ids and log-probabilities are all there and of one length."""
        return (
            self.prompt_ids is not None
            and self.response_ids is not None
            and self.response_logprobs is not None
            and len(self.response_ids) == len(self.response_logprobs)
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """One training row. All but `prompt_ids` [n_prompt] have one length [n_response].

    `response_mask` is 1 exactly where the policy sampled the token; elsewhere the log-probability is 0.0 and the
    policy version NO_VERSION.
    """

    prompt_ids: TokenIds
    response_ids: TokenIds
    response_mask: Mask
    response_logprobs: LogProbs
    policy_versions: TokenIds

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.response_mask), len(self.response_logprobs)}
        if lengths != {len(self.policy_versions)}:
            raise ValueError(f"a segment's response arrays differ in length: {sorted(lengths)}")


def version_number(version: str) -> int:
    """An engine's weight version as a number; NO_VERSION where it is not one."""
    return int(version) if version.isdecimal() else NO_VERSION


def segments(calls: Sequence[ModelCall]) -> tuple[Segment, ...]:
    """The training rows of a rollout's token-exact model calls, in the order in which they began."""
    open_rows: list[_Row] = []
    for call in calls:
        if not call.token_exact:
            continue
        for row in reversed(open_rows):
            if row.extend(call):
                break
        else:
            open_rows.append(_Row(call))
    return tuple(row.segment() for row in open_rows)


class _Row:
    """A segment while it grows: all ids so far, and which stretches of them were sampled."""

    def __init__(self, call: ModelCall) -> None:
        assert call.prompt_ids is not None
        self.ids = call.prompt_ids
        self.n_prompt = len(call.prompt_ids)
        self.sampled: list[tuple[int, ModelCall]] = []
        self._append(call)

    def extend(self, call: ModelCall) -> bool:
        """Take a call whose prompt begins with all ids so far; False if it does not."""
        assert call.prompt_ids is not None
        n = len(self.ids)
        if len(call.prompt_ids) < n or not np.array_equal(call.prompt_ids[:n], self.ids):
            return False
        self.ids = call.prompt_ids
        self._append(call)
        return True

    def _append(self, call: ModelCall) -> None:
        assert call.response_ids is not None
        self.sampled.append((len(self.ids), call))
        self.ids = np.concatenate([self.ids, call.response_ids])

    def segment(self) -> Segment:
        n = len(self.ids)
        mask = np.zeros(n, np.uint8)
        logprobs = np.zeros(n, np.float32)
        versions = np.full(n, NO_VERSION, np.int32)
        for start, call in self.sampled:
            assert call.response_logprobs is not None
            stretch = slice(start, start + len(call.response_logprobs))
            mask[stretch] = 1
            logprobs[stretch] = call.response_logprobs
            versions[stretch] = version_number(call.policy_version)
        response = slice(self.n_prompt, n)
        return Segment(
            self.ids[: self.n_prompt], self.ids[response], mask[response], logprobs[response], versions[response]
        )
