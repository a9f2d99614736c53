"""One answer from token ids: sampled in one part or, if aborted from outside, in several.

Tokens sampled before an abort are kept; the rest is requested from all ids so far, possibly on another engine. So one
answer may span several versions of the weights, which are recorded for each of its tokens.

Of an answer that is streamed while it is sampled, sent deltas cannot be revoked, so only this answer may follow them.
The ids keep a stop string, as sampled; the visible message ends before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce

import numpy as np

from farm.errors import EngineError, LimitReached
from farm.records.experts.routed_experts import CallExperts
from farm.records.request import SamplingParams
from farm.records.trajectory import Message, SampledTokens, TokenIds, VersionSpan, field_values
from farm.seeds import part_seed
from workers.plugins.interfaces import Completion, Delta, OnDelta
from workers.policy.answer_form import GUIDED, FormedSampling, guide_of, is_spelled
from workers.policy.generation import (
    Engine,
    EngineBusy,
    EngineRefused,
    ExpertRange,
    FormUnsupported,
    Generation,
    SpelledCompletion,
)
from workers.policy.tokens.session import Prompt
from workers.policy.tokens.tokenizer import Tokenizer
from workers.policy.tool_calls import Parsed, Parser
from workers.policy.tool_calls.scanner import any_of, held_from

_MAX_ABORTS = 100
"""Maximum aborts of one answer from outside; more of them indicate faulty engines."""
_ABORT_PAUSE_S = 0.1
"""Seconds until the next request to an engine that aborted an answer: its pause may not be known here yet."""


def before_stop(text: str, reason: str | int | None, stops: Sequence[str]) -> str:
    """Return the text up to `reason`, the stop string that ended it; all of it if none did."""
    if not reason or not isinstance(reason, str) or reason not in stops:
        return text
    head, stop, _ = text.rpartition(reason)
    return head if stop else text


class StopStream:
    """Filters streamed text: holds back what may become a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def feed(self, text: str) -> str:
        """Add text, and return the part that can be passed on now."""
        self._held += text
        if not self._stops:
            return self._give(len(self._held))
        # A longer one may have begun before a complete one.
        n = held_from(self._held, 0, self._stops)
        match = any_of(self._stops).search(self._held)
        return self._give(min(n, match.start()) if match else n)

    def end(self, reason: str | int | None) -> str:
        """Return the rest, up to the stop string that ended it."""
        return before_stop(self._give(len(self._held)), reason, self._stops)

    def _give(self, n: int) -> str:
        text, self._held = self._held[:n], self._held[n:]
        return text


class Interrupted(EngineRefused):
    """A stream broke off after its beginning was sent; the client may retry."""

    retryable = True


class StreamForwarder:
    """One answer on its way to the client."""

    def __init__(self, tokenizer: Tokenizer, parser: Parser, stops: Sequence[str], on_delta: OnDelta) -> None:
        self.begun = False
        self._broken = False
        self._text = tokenizer.stream()
        self._stops = StopStream(stops)
        self._splitter = parser.stream()
        self._on_delta = on_delta

    @contextmanager
    def part(self) -> Iterator[None]:
        """Surround the sampling of a part. Raises Interrupted if an earlier part broke off, as its ids are lost."""
        if self._broken:
            raise Interrupted("the answer broke off after its beginning was passed on; ask again")
        yield
        self._broken = False

    def feed(self, ids: Sequence[int]) -> None:
        self.begun = self._broken = True
        self._pass_on(self._splitter.feed(self._stops.feed(self._text.feed(ids))))

    def end(self, reason: str | int | None) -> None:
        """Send the rest, once the answer has ended for `reason`."""
        rest = self._stops.feed(self._text.end()) + self._stops.end(reason)
        self._pass_on(self._splitter.feed(rest))
        self._pass_on(self._splitter.end())

    def _pass_on(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            self._on_delta(delta)


class TokenCompletion:
    """The answer to one prompt, as far as it is sampled. `live` streams it; None for no streaming.

    `n_layers` is the number of layers of earlier calls' routed experts; None if unknown.
    """

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: Tokenizer,
        parser: Parser,
        sampling: SamplingParams,
        max_tokens: int,
        live: StreamForwarder | None,
        n_layers: int | None = None,
    ) -> None:
        self.prompt = prompt
        self._n_layers = n_layers
        self._tokenizer = tokenizer
        self._parser = parser
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._live = live
        self._parts: list[Generation] = []
        self._mismatches: list[int] = []

    @property
    def ended(self) -> bool:
        return bool(self._parts) and self._parts[-1].finish_reason != "abort"

    @property
    def begun(self) -> bool:
        """True if a part of it has been streamed."""
        return self._live is not None and self._live.begun

    @property
    def response_ids(self) -> TokenIds:
        return np.concatenate([part.response_ids for part in self._parts])

    async def resume(self, engine: Engine, model: str, session_id: str, version: str) -> None:
        """Request the rest. Raises EngineBusy if the engine aborted it, so that the call waits for the engine.

        `version` is that of the weights if the engine does not tell it.
        """
        ids = np.concatenate([self.prompt.ids, *(part.response_ids for part in self._parts)])
        room = self._max_tokens - (len(ids) - len(self.prompt.ids))
        try:
            part = await self._generate(engine, ids, room, model, session_id)
        except LimitReached:
            if not self._parts:
                raise
            # The ids sampled before the abort fill the context of this engine.
            self._end_by_length()
            return
        self._take(part, ids, version)
        if part.finish_reason != "abort":
            return
        if len(part.response_ids) >= room:
            # An answer aborted at `max_tokens` was ended by that limit.
            self._end_by_length()
            return
        if len(self._parts) > _MAX_ABORTS:
            raise EngineError(f"engine {engine.address.url} aborted one answer {_MAX_ABORTS} times")
        if guide_of(self._sampling):
            self._restart()
        n_ids = len(ids) + len(part.response_ids)
        raise EngineBusy(
            f"engine {engine.address.url} aborted the answer; it continues after {n_ids} ids", _ABORT_PAUSE_S
        )

    def _restart(self) -> None:
        """Drop the sampled ids: a guide applies from the beginning. Raises Interrupted if they were streamed."""
        if self.begun:
            raise Interrupted("the guided answer broke off after its beginning was passed on; ask again")
        self._parts.clear()
        self._mismatches.clear()

    async def _generate(self, engine: Engine, ids: TokenIds, room: int, model: str, session_id: str) -> Generation:
        """Sample the rest; freely if the engine refuses the requested form, unless it is required."""
        ask = partial(
            engine.generate,
            ids,
            self._drawn(len(ids) - len(self.prompt.ids)),
            room,
            model=model,
            session_id=session_id,
            n_vocabulary=self._tokenizer.size,
            experts=self._experts_wanted(),
        )
        try:
            if self._live is None:
                return await ask()
            with self._live.part():
                return await ask(on_ids=self._live.feed)
        except FormUnsupported:
            if not isinstance(self._sampling, FormedSampling) or self._sampling.required:
                raise
            self._sampling = self._sampling.model_copy(update={"guide": None})
        return await self._generate(engine, ids, room, model, session_id)

    def _experts_wanted(self) -> ExpertRange | None:
        """Return the missing range of experts: earlier calls have those of all held ids except the last."""
        if self._sampling.routed_experts is None:
            return None
        taken = self._experts()
        if taken is not None and taken.ids is not None:
            return ExpertRange(self._sampling.routed_experts, taken.end, taken.ids.shape[1])
        return ExpertRange(self._sampling.routed_experts, max(self.prompt.n_held - 1, 0), self._n_layers)

    def _experts(self) -> CallExperts | None:
        """Return the experts of all parts as one; each part continues where the previous one ends."""
        parts = [part.routed_experts for part in self._parts if part.routed_experts is not None]
        return reduce(CallExperts.then, parts) if parts else None

    def _drawn(self, n_sampled: int) -> SamplingParams:
        """Return the sampling after `n_sampled` tokens: the seed of the first part would repeat its draws."""
        seed, least = self._sampling.seed, self._sampling.min_tokens
        if not n_sampled or (seed is None and not least):
            return self._sampling
        return self._sampling.model_copy(
            update={
                "seed": None if seed is None else part_seed(seed, n_sampled),
                "min_tokens": None if least is None else max(0, least - n_sampled),
            }
        )

    def _take(self, part: Generation, ids: TokenIds, version: str) -> None:
        mismatch = _first_difference(ids, part.prompt_ids)
        if mismatch is not None:
            self._mismatches.append(mismatch)
        if not part.versions:
            part = replace(part, versions=(VersionSpan(version, 0, len(part.response_ids)),))
        self._parts.append(part)

    def _end_by_length(self) -> None:
        self._parts[-1] = replace(self._parts[-1], finish_reason="length")

    def parsed(self) -> Parsed:
        """Parse the whole answer, once it has ended, and stream the part that was held back."""
        reason = self._parts[-1].stop_reason
        if self._live is not None:
            self._live.end(reason)
        text = self._tokenizer.decode(self._tokenizer.body(self.response_ids))
        return self._parser.parse(before_stop(text, reason, self._sampling.stop))

    def completion(self, engine: str, message: Message, n_invalid: int) -> Completion:
        whole = self._whole()
        completion = Completion(
            **field_values(whole, SampledTokens),
            response=message,
            engine=engine,
            n_prompt_tokens=len(self.prompt.ids),
            n_response_tokens=len(whole.response_ids),
            policy_version=whole.versions[0].version if whole.versions else "",
            n_invalid=n_invalid,
            begins=self.prompt.begins,
            mismatch=min(self._mismatches, default=None),
            labels={GUIDED: "yes"} if guide_of(self._sampling) else {},
        )
        if not is_spelled(self._sampling):
            return completion
        texts = self._tokenizer.texts(whole.response_ids)
        return SpelledCompletion(**field_values(completion, Completion), token_texts=texts)

    def _whole(self) -> Generation:
        logprobs = [part.response_logprobs for part in self._parts if part.response_logprobs is not None]
        return replace(
            self._parts[-1],
            prompt_ids=self.prompt.ids,
            response_ids=self.response_ids,
            response_logprobs=np.concatenate(logprobs) if len(logprobs) == len(self._parts) else None,
            versions=_joined_versions(self._parts),
            n_cached_tokens=self._parts[0].n_cached_tokens,
            routed_experts=self._experts(),
        )


def _first_difference(sent: TokenIds, seen: TokenIds | None) -> int | None:
    if seen is None or np.array_equal(sent, seen):
        return None
    n = min(len(sent), len(seen))
    different = np.flatnonzero(sent[:n] != seen[:n])
    return int(different[0]) if len(different) else n


def _joined_versions(parts: Sequence[Generation]) -> tuple[VersionSpan, ...]:
    """Return the spans of all parts, merged where the version is equal; empty if no version is known."""
    spans: list[VersionSpan] = []
    offset = 0
    for part in parts:
        for span in part.versions:
            start, end = span.start + offset, span.end + offset
            if spans and spans[-1].version == span.version:
                spans[-1] = replace(spans[-1], end=end)
            elif start < end:
                # Weights replaced before the first token sampled nothing.
                spans.append(VersionSpan(span.version, start, end))
        offset += len(part.response_ids)
    return tuple(spans) if any(span.version for span in spans) else ()
