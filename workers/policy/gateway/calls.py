"""The model calls of one black-box agent: counted against the rollout's limits, answered by its policy, recorded.

An answer is sent only once it is recorded. The error of an unanswered call is kept, as the agent may swallow it: a
rollout is never scored as if its engine had not failed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable

from farm.errors import LimitReached, StaleRollout, WeightsMissing
from farm.records.request import SamplingParams
from farm.records.rollout import Outcome
from workers.interfaces import AgentContext, Completion, Delta, OnDelta
from workers.policy.gateway.conversations import Conversations, HashedConversation
from workers.policy.gateway.model_api import ParsedRequest
from workers.policy.gateway.system_messages import one_leading
from workers.policy.recording import Stopwatch, as_applied, model_call
from workers.policy.tokens.messages import n_chars

_MAX_FAILED = 32
"""Number of unanswered conversations after which no call is answered any more: each is held in memory."""


class GatewayCalls:
    """The model calls of one rollout, any number at once, as agents have sub-agents.

    Concurrent calls may together exceed `max_tokens` by the number of tokens that each was allowed.
    """

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._branches = Conversations()
        self._failures: dict[bytes, Exception] = {}
        self._full: LimitReached | None = None
        self._end: Exception | None = None
        self._n_begun = 0
        self._n_sampled = 0
        self._writing: set[asyncio.Future[None]] = set()
        self.n_answered = 0
        self.n_chars_per_token = 4.0
        self.begun = asyncio.Event()
        """Set once a request has arrived."""
        self.over = asyncio.Event()
        """Set once no further call will be answered."""

    async def complete(self, asked: ParsedRequest, on_delta: OnDelta | None = None) -> Completion:
        """Answer a request and record it. Raises what Policy raises, and LimitReached beyond the rollout's limits."""
        self.begun.set()
        max_tokens = self._begin(asked)
        conversation = HashedConversation(one_leading(asked.messages))
        try:
            completion = await self._answered(asked, conversation, max_tokens, on_delta)
        except LimitReached as limit:
            self._reached(limit)
            raise
        except Exception as error:
            self._failed(conversation.digest, error)
            raise
        # the same request was answered at another try
        self._failures.pop(conversation.digest, None)
        return completion

    @property
    def limit(self) -> LimitReached | None:
        """The limit that ended the conversation; None if it went on, as a shortened conversation does."""
        return self._end if isinstance(self._end, LimitReached) else self._full

    @property
    def failure(self) -> Exception | None:
        """The error of a request that was not answered by a retry either; None if there is none."""
        if self._end is not None and not isinstance(self._end, LimitReached):
            return self._end
        return next(iter(self._failures.values()), None)

    async def settle(self) -> None:
        """Wait until all answers are recorded."""
        await asyncio.gather(*self._writing, return_exceptions=True)

    def _begin(self, asked: ParsedRequest) -> int:
        """Count a call; return how many tokens it may sample. Raises LimitReached, or the rollout's error."""
        if self._end is not None:
            # an exception that is raised repeatedly would keep every frame of its tracebacks alive
            raise self._end.with_traceback(None)
        limits = self._context.limits
        if self._n_begun >= limits.max_turns:
            raise self._ended(LimitReached(Outcome.MAX_TURNS, f"all {limits.max_turns} turns are taken"))
        left = limits.max_tokens - self._n_sampled
        if left <= 0:
            raise self._ended(LimitReached(Outcome.MAX_TOKENS, f"{self._n_sampled} tokens are sampled"))
        self._n_begun += 1
        wanted = (self._context.sampling.max_tokens, asked.max_tokens)
        return min([left, *(each for each in wanted if each is not None)])

    async def _answered(
        self, asked: ParsedRequest, conversation: HashedConversation, max_tokens: int, on_delta: OnDelta | None
    ) -> Completion:
        sampling = self._sampling(asked)
        watch = Stopwatch()
        shown = _Shown(on_delta)
        try:
            completion = await self._context.policy.complete(
                conversation.messages, asked.tools, sampling, max_tokens, shown if on_delta is not None else None
            )
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and shown.n_chars:
                # a client that disconnects after reading part of the answer has had a turn
                self._n_sampled += math.ceil(shown.n_chars / self.n_chars_per_token)
            else:
                # it is no turn, and the client may try again
                self._n_begun -= 1
            raise
        applied = {**as_applied(sampling, max_tokens), "asked": asked.requested_params}
        call = model_call(self.n_answered, self._branches.new(conversation), completion, watch, applied)
        self._took(asked, conversation, completion, max_tokens)
        await self._uncut(self._context.record(call))
        return completion

    def _sampling(self, asked: ParsedRequest) -> SamplingParams:
        ours = self._context.sampling
        return ours.model_copy(update={"stop": tuple(dict.fromkeys((*ours.stop, *asked.stop)))})

    def _took(
        self, asked: ParsedRequest, conversation: HashedConversation, completion: Completion, max_tokens: int
    ) -> None:
        self.n_answered += 1
        self._branches.add(conversation, completion.response)
        self._n_sampled += completion.n_response_tokens
        self._full = None
        if completion.n_prompt_tokens:
            self.n_chars_per_token = max(1.0, n_chars(asked.messages, asked.tools) / completion.n_prompt_tokens)
        if completion.finish_reason != "length":
            return
        if self._n_sampled >= self._context.limits.max_tokens:
            self._ended(LimitReached(Outcome.MAX_TOKENS, f"{self._n_sampled} tokens are sampled"))
        elif completion.n_response_tokens < max_tokens:
            # an engine that stops short of what it was allowed has run out of context
            self._full = LimitReached(Outcome.CONTEXT_FULL, "the answer was cut, as the context is full")

    async def _uncut(self, writing: Awaitable[None]) -> None:
        """Await `writing` to its end even if the client disconnects meanwhile."""
        task = asyncio.ensure_future(writing)
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        await asyncio.shield(task)

    def _reached(self, limit: LimitReached) -> None:
        if limit.outcome is Outcome.CONTEXT_FULL:
            self._full = limit
        else:
            self._ended(limit)

    def _failed(self, conversation: bytes, error: Exception) -> None:
        self._failures[conversation] = error
        if isinstance(error, StaleRollout | WeightsMissing) or len(self._failures) > _MAX_FAILED:
            self._ended(error)

    def _ended(self, reason: Exception) -> Exception:
        self._end = self._end or reason
        self.over.set()
        return reason


class _Shown:
    """A callback that passes on the deltas of an answer, and counts their characters."""

    def __init__(self, on_delta: OnDelta | None) -> None:
        self._on_delta = on_delta
        self.n_chars = 0

    def __call__(self, delta: Delta) -> None:
        self.n_chars += len(delta.text)
        if self._on_delta is not None:
            self._on_delta(delta)
