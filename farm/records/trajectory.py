"""Trajectories in tokens: model calls, and the training rows (segments) built from them.

Token ids are the trajectory; text is for people. A call whose prompt begins with all the ids of an earlier call
continues that call's segment: the ids in between were not sampled (mask 0). A call that continues nothing starts a new
segment. So a rollout has 0..N training rows, and sampled text is never tokenised again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from farm.errors import InvalidRequest
from farm.records.experts.routed_experts import CallExperts, RowExperts
from farm.records.prefixes import Prefixes

Message: TypeAlias = dict[str, Any]
"""A chat message in the form of the OpenAI API: role, content, and tool_calls or tool_call_id. In a recorded message an
image is a part `{"type": "image", "sha256", "media_type", "n_bytes"}`."""

ToolSchema: TypeAlias = dict[str, Any]
"""A tool in the form of the OpenAI API: type, and function with name, description and parameters."""

TokenIds: TypeAlias = NDArray[np.int32]
LogProbs: TypeAlias = NDArray[np.float32]
Mask: TypeAlias = NDArray[np.uint8]

_MAX_DIGITS = 10
_MAX_NUMBER = int(np.iinfo(np.int32).max)
ROLE = "role"
"""The label of calls answered by a model other than the policy: they have no ids, and never train."""
UNTRAINED = "trains"
"""The label, `no`, of calls of the policy that do not train."""
NO_VERSION = -1
"""The policy version of a token that was not sampled, or of a call whose engine reports none."""


def token_ids(values: Sequence[int] | TokenIds) -> TokenIds:
    """Return ids as an int32 array, [n]."""
    return np.asarray(values, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of the policy; `arguments` is the raw sampled text, which may not be JSON."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """The weights `version` sampled the response ids [start, end)."""

    version: str
    start: int
    end: int


@dataclass(slots=True, kw_only=True)
class SampledTokens:
    """The tokens of an answer and how sampling ended: the part that all routes return in the same form.

    `prompt_ids` [n_prompt], `response_ids` and `response_logprobs` [n_response]; None if the engine does not return
    them. The end-of-turn token and a stop string are included if they were sampled. `versions` cover [0, n_response) if
    the weights are known. `routed_experts` are present if requested; they need not start at the prompt's first token.
    `finish_reason` is `stop`, `length`, `abort` (ended from outside, with the tokens so far) or the engine's own;
    `stop_reason` is the stop string or the token that ended it, if any.
    """

    finish_reason: str
    stop_reason: str | int | None = None
    prompt_ids: TokenIds | None = None
    response_ids: TokenIds | None = None
    response_logprobs: LogProbs | None = None
    versions: tuple[VersionSpan, ...] = ()
    n_cached_tokens: int | None = None
    routed_experts: CallExperts | None = None


@dataclass(slots=True, kw_only=True)
class Completion(SampledTokens):
    """One answer of an LLM: the assistant message `response`, and its tokens.

    Tool calls that could not be parsed are in the message with their raw text as arguments; `n_invalid` counts them. A
    stop string is never in the message. `policy_version` is the first of `versions`. `begins` says why the call starts
    a segment, empty if it continues one. `mismatch` is the first position at which the prompt seen by the engine
    differs from the `prompt_ids` sent; None if they are equal or the engine does not report it. `labels` describe the
    call, by names such as `model`, the requested one.
    """

    response: Message
    engine: str
    n_prompt_tokens: int
    n_response_tokens: int
    policy_version: str = ""
    n_invalid: int = 0
    begins: str = ""
    mismatch: int | None = None
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ModelCall(Completion):
    """One request to an LLM and its completion, recorded as it happens.

    `messages` are only those added since the call that it continues; `observations` are the tool results, or the
    environment's messages, that answered it, and `reward` is the environment's reward for it, or None. `tools` are the
    ones offered to the policy, in the form of the chat API, [] if none. In a call read from the store they are None if
    its prompt continues another call's, which had the same ones: see `tools_by_call`. `images` are the digests of the
    images in its prompt, in order of their positions, with repetitions.
    """

    index: int
    messages: list[Message]
    started_at: float
    latency_s: float
    sampling: dict[str, Any] = field(default_factory=dict)
    observations: list[Message] = field(default_factory=list)
    reward: float | None = None
    tools: list[ToolSchema] | None = None
    images: tuple[str, ...] = ()

    @property
    def token_exact(self) -> bool:
        """True if ids and log-probabilities are complete and have one length."""
        return (
            self.prompt_ids is not None
            and self.response_ids is not None
            and self.response_logprobs is not None
            and len(self.response_ids) == len(self.response_logprobs)
        )


def field_values(record: SampledTokens, kind: type[SampledTokens]) -> dict[str, Any]:
    """Return the fields of a record that `kind` has, as keyword arguments for a subclass."""
    return {each.name: getattr(record, each.name) for each in fields(kind)}


@dataclass(frozen=True, slots=True)
class Segment:
    """One training row. All arrays but `prompt_ids` [n_prompt] have one length [n_response].

    `response_mask` is 1 exactly where the policy sampled the token; elsewhere the log-probability is 0.0 and the policy
    version NO_VERSION. `mismatch` is the first position in the row, counted from the start of its prompt, at which an
    engine saw another token than it was sent; None without one. `turn_rewards` are rewards of single turns, from an
    environment or an evaluator, each with the index in the response of the turn's last token. `reward` is the row's own
    reward from an evaluator; None: the rollout's. `routed_experts` are of prompt and response, [n_prompt + n_response];
    None if not recorded. `images` are the digests (SHA-256) of its images in the order of their placeholder ids in
    prompt and response, with repetitions. The rollout's artefacts hold them.
    """

    prompt_ids: TokenIds
    response_ids: TokenIds
    response_mask: Mask
    response_logprobs: LogProbs
    policy_versions: TokenIds
    mismatch: int | None = None
    turn_rewards: tuple[tuple[int, float], ...] = ()
    reward: float | None = None
    routed_experts: RowExperts | None = None
    images: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.response_mask), len(self.response_logprobs)}
        if lengths != {len(self.policy_versions)}:
            raise ValueError(f"a segment's response arrays differ in length: {sorted(lengths)}")
        n = len(self.prompt_ids) + len(self.response_ids)
        if self.routed_experts is not None and len(self.routed_experts) != n:
            raise ValueError(f"a segment of {n} tokens has experts for {len(self.routed_experts)}")

    @property
    def untrainable(self) -> str:
        """The reason it may not train; empty if it may."""
        if self.mismatch is not None:
            return f"an engine saw another token than it was sent at position {self.mismatch}"
        return "" if self.response_mask.any() else "it has no sampled tokens"

    @property
    def trainable(self) -> bool:
        return not self.untrainable

    @property
    def version_span(self) -> tuple[int, int]:
        """The oldest and the newest weights that sampled it; NO_VERSION if unknown."""
        sampled = self.policy_versions[self.response_mask == 1]
        return (int(sampled.min()), int(sampled.max())) if len(sampled) else (NO_VERSION, NO_VERSION)

    def masked(self) -> Segment:
        """Return the row with mask 0 everywhere."""
        n = len(self.response_ids)
        return replace(
            self,
            response_mask=np.zeros(n, np.uint8),
            response_logprobs=np.zeros(n, np.float32),
            policy_versions=np.full(n, NO_VERSION, np.int32),
        )

    def cut(self, n_tokens: int) -> Segment:
        """Return the row with only the first `n_tokens` of its response.

        Raises InvalidRequest for a longer row with images: it is unknown which of them would be left.
        """
        if len(self.response_ids) <= n_tokens:
            return self
        if self.images:
            raise InvalidRequest(
                f"a row with images has a response of {len(self.response_ids)} tokens, and cannot be cut to "
                f"{n_tokens}: raise the trainer's limit, or lower the limits of the rollouts"
            )
        mismatch = self.mismatch
        if mismatch is not None and mismatch >= len(self.prompt_ids) + n_tokens:
            mismatch = None
        return Segment(
            self.prompt_ids,
            self.response_ids[:n_tokens],
            self.response_mask[:n_tokens],
            self.response_logprobs[:n_tokens],
            self.policy_versions[:n_tokens],
            mismatch,
            tuple((position, reward) for position, reward in self.turn_rewards if position < n_tokens),
            self.reward,
            self.routed_experts and self.routed_experts.cut(len(self.prompt_ids) + n_tokens),
        )


def version_number(version: str) -> int:
    """Return an engine's weight version as a number; NO_VERSION if it is not one, or not an int32."""
    if not (version.isascii() and version.isdecimal()) or len(version) > _MAX_DIGITS:
        return NO_VERSION
    number = int(version)
    return number if number <= _MAX_NUMBER else NO_VERSION


def token_versions(call: ModelCall) -> TokenIds:
    """Return the weight version of each response token of a call, [n_response]: by its spans, else `policy_version`."""
    n = call.n_response_tokens if call.response_ids is None else len(call.response_ids)
    versions = np.full(n, version_number(call.policy_version), np.int32)
    for span in call.versions:
        versions[span.start : span.end] = version_number(span.version)
    return versions


def version_range(calls: Sequence[ModelCall]) -> tuple[int | None, int | None]:
    """Return the oldest and the newest weights that sampled a token of these calls; only versions with numbers
    count."""
    known = np.concatenate([np.empty(0, np.int32), *map(token_versions, calls)])
    known = known[known != NO_VERSION]
    return (int(known.min()), int(known.max())) if len(known) else (None, None)


def segments(calls: Sequence[ModelCall]) -> tuple[Segment, ...]:
    """Return the training rows of a rollout's token-exact model calls, in the order in which they start.

    A call continues the row that matches the longest part of its prompt, the newest of several. Where calls branch,
    shared tokens are sampled in the first row and stand in the prompts of the others, so each trains once.
    """
    return tuple(row.segment() for row in _rows(calls))


def segments_per_call(calls: Sequence[ModelCall]) -> tuple[Segment, ...]:
    """Return a training row for each token-exact model call of a rollout, in order: its prompt and its answer."""
    return tuple(row.segment() for call in calls for row in _rows([call]))


def calls_of_segments(calls: Sequence[ModelCall]) -> tuple[tuple[ModelCall, ...], ...]:
    """Return, for each row of `segments`, the model calls that sampled it, in order."""
    return tuple(row.calls for row in _rows(calls))


def tools_by_call(calls: Sequence[ModelCall]) -> dict[int, list[ToolSchema]]:
    """Return the tools offered to the policy in each of a rollout's calls, by index; [] if none or unknown.

    The tools of a training row are those of its first call.
    """
    by_call: dict[int, list[ToolSchema]] = {}
    known = Prefixes()
    for call in calls:
        prompt, tools = call.prompt_ids, call.tools
        if tools is None:
            continued = None if prompt is None else known.longest(prompt, images=call.images)
            tools = [] if continued is None else by_call[continued]
        by_call[call.index] = tools
        if prompt is not None and call.response_ids is not None:
            known.put(call.index, np.concatenate([prompt, call.response_ids]), call.images)
    return by_call


def all_tools(calls: Sequence[ModelCall]) -> list[ToolSchema]:
    """Return the distinct tools offered to the policy in any of these calls, in order."""
    tools: list[ToolSchema] = []
    for call in calls:
        tools += [tool for tool in call.tools or () if tool not in tools]
    return tools


def _rows(calls: Sequence[ModelCall]) -> list[_Row]:
    rows: list[_Row] = []
    known = Prefixes()
    for call in calls:
        if not call.token_exact:
            continue
        assert call.prompt_ids is not None
        number = known.longest(call.prompt_ids, images=call.images)
        if number is None:
            number = len(rows)
            rows.append(_Row(len(call.prompt_ids)))
        rows[number].take(call)
        known.put(number, rows[number].ids, rows[number].images)
    return rows


class _Row:
    """A segment while it grows: all ids so far, and the ranges that were sampled."""

    def __init__(self, n_prompt: int) -> None:
        self.ids = token_ids([])
        self.images: tuple[str, ...] = ()
        self._n_prompt = n_prompt
        self._sampled: list[tuple[int, ModelCall]] = []

    @property
    def calls(self) -> tuple[ModelCall, ...]:
        return tuple(call for _, call in self._sampled)

    def take(self, call: ModelCall) -> None:
        assert call.prompt_ids is not None
        assert call.response_ids is not None
        self._sampled.append((len(call.prompt_ids), call))
        self.ids = np.concatenate([call.prompt_ids, call.response_ids])
        self.images = call.images

    def segment(self) -> Segment:
        n = len(self.ids)
        mask = np.zeros(n, np.uint8)
        logprobs = np.zeros(n, np.float32)
        versions = np.full(n, NO_VERSION, np.int32)
        for start, call in self._sampled:
            assert call.response_logprobs is not None
            stretch = slice(start, start + len(call.response_logprobs))
            mask[stretch] = 1
            logprobs[stretch] = call.response_logprobs
            versions[stretch] = token_versions(call)
        response = slice(self._n_prompt, n)
        return Segment(
            self.ids[: self._n_prompt],
            self.ids[response],
            mask[response],
            logprobs[response],
            versions[response],
            min((call.mismatch for _, call in self._sampled if call.mismatch is not None), default=None),
            tuple(
                (start + call.n_response_tokens - 1 - self._n_prompt, call.reward)
                for start, call in self._sampled
                if call.reward is not None
            ),
            images=self.images,
        )
