"""One answer from token ids: sampled in one part or, where it was cut short from outside, in several.

What was sampled before an abort stays; the rest is asked for from all ids so far, be it of another engine. So one
answer may span several versions of the weights, and each of its tokens says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from farm.errors import EngineError, LimitReached
from farm.request import SamplingParams
from farm.trajectory import LogProbs, Message, TokenIds, VersionSpan
from workers.interfaces import Completion
from workers.policy.generation import Engine, EngineBusy, Generation
from workers.policy.live import Live
from workers.policy.parsing import Parsed, Parser
from workers.policy.stops import before_stop
from workers.policy.tokens.session import Prompt
from workers.policy.tokens.tokenizer import Tokenizer

_MAX_ABORTS = 100
"""How often an answer may be cut short from outside before something must be wrong with the engines."""

_ABORT_PAUSE_S = 0.1
"""How long an engine that cut answers short is left alone: news of its pause may yet be on the way."""


class ExactCall:
    """What was sampled so far for one prompt. `live` passes it on as it comes, if anybody wants that."""

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: Tokenizer,
        parser: Parser,
        sampling: SamplingParams,
        max_tokens: int,
        live: Live | None,
    ) -> None:
        self.prompt = prompt
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
        """Whether something of it was passed on."""
        return self._live is not None and self._live.begun

    @property
    def response_ids(self) -> TokenIds:
        return np.concatenate([part.response_ids for part in self._parts])

    async def go_on(self, engine: Engine, model: str, session_id: str, told: str) -> None:
        """Ask for what is missing. Raises EngineBusy if the engine was told to stop, so that the call waits for it.

        `told` is the version of the weights where the engine says nothing of it.
        """
        ids = np.concatenate([self.prompt.ids, *(part.response_ids for part in self._parts)])
        room = self._max_tokens - (len(ids) - len(self.prompt.ids))
        try:
            part = await self._generate(engine, ids, room, model, session_id)
        except LimitReached:
            if not self._parts:
                raise
            # what was sampled before the abort fills the context of this engine
            self._end_by_length()
            return
        self._take(part, ids, told)
        if part.finish_reason != "abort":
            return
        if len(part.response_ids) >= room:
            # what was aborted at the very limit was cut by it
            self._end_by_length()
            return
        if len(self._parts) > _MAX_ABORTS:
            raise EngineError(f"engine {engine.address.url} aborted one answer {_MAX_ABORTS} times")
        n_ids = len(ids) + len(part.response_ids)
        raise EngineBusy(
            f"engine {engine.address.url} aborted the answer; it goes on after {n_ids} ids", _ABORT_PAUSE_S
        )

    async def _generate(self, engine: Engine, ids: TokenIds, room: int, model: str, session_id: str) -> Generation:
        live = self._live
        if live is None:
            return await engine.generate(ids, self._sampling, room, model=model, session_id=session_id)
        with live.part():
            return await engine.generate(
                ids, self._sampling, room, model=model, session_id=session_id, on_ids=live.feed
            )

    def _take(self, part: Generation, ids: TokenIds, told: str) -> None:
        mismatch = _first_difference(ids, part.prompt_ids)
        if mismatch is not None:
            self._mismatches.append(mismatch)
        if not part.versions:
            part = replace(part, versions=(VersionSpan(told, 0, len(part.response_ids)),))
        self._parts.append(part)

    def _end_by_length(self) -> None:
        self._parts[-1] = replace(self._parts[-1], finish_reason="length")

    def parsed(self) -> Parsed:
        """The whole answer, once it has ended; passes on what was kept back of it."""
        reason = self._parts[-1].stop_reason
        if self._live is not None:
            self._live.end(reason)
        text = self._tokenizer.decode(self._tokenizer.body(self.response_ids))
        return self._parser.parse(before_stop(text, reason, self._sampling.stop))

    def completion(self, engine: str, message: Message, n_invalid: int) -> Completion:
        last = self._parts[-1]
        versions = _joined_versions(self._parts)
        response = self.response_ids
        return Completion(
            message=message,
            finish_reason=last.finish_reason,
            engine=engine,
            n_prompt_tokens=len(self.prompt.ids),
            n_response_tokens=len(response),
            policy_version=versions[0].version if versions else "",
            prompt_ids=self.prompt.ids,
            response_ids=response,
            response_logprobs=_joined_logprobs(self._parts),
            versions=versions,
            stop_reason=last.stop_reason,
            n_cached_tokens=self._parts[0].n_cached_tokens,
            n_invalid=n_invalid,
            begins=self.prompt.begins,
            mismatch=min(self._mismatches, default=None),
        )


def _first_difference(sent: TokenIds, seen: TokenIds | None) -> int | None:
    if seen is None or np.array_equal(sent, seen):
        return None
    n = min(len(sent), len(seen))
    different = np.flatnonzero(sent[:n] != seen[:n])
    return int(different[0]) if len(different) else n


def _joined_logprobs(parts: Sequence[Generation]) -> LogProbs | None:
    found = [part.response_logprobs for part in parts if part.response_logprobs is not None]
    return np.concatenate(found) if len(found) == len(parts) else None


def _joined_versions(parts: Sequence[Generation]) -> tuple[VersionSpan, ...]:
    """Spans of all parts, those of the same weights as one; none if nobody knows any version."""
    spans: list[VersionSpan] = []
    offset = 0
    for part in parts:
        for span in part.versions:
            start, end = span.start + offset, span.end + offset
            if spans and spans[-1].version == span.version:
                spans[-1] = replace(spans[-1], end=end)
            elif start < end:
                # nothing was sampled by weights that were replaced before the first token
                spans.append(VersionSpan(span.version, start, end))
        offset += len(part.response_ids)
    return tuple(spans) if any(span.version for span in spans) else ()
