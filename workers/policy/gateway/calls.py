"""The model calls of one black-box agent: counted against the rollout's limits, answered by its policy, recorded.

An answer is recorded before it is sent. The error of an unanswered call is kept, as the agent may swallow it: a rollout
is never scored as if its engine had not failed.

Agents send several system messages at the beginning, or new ones in the middle; many chat templates refuse those or
drop them silently. Leading ones are joined, which loses nothing; a later one becomes a user message in its place, so
that all ids before it stay unchanged.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, TypeVar

from farm.errors import AgentError, EngineError, LimitReached, StaleRollout, WeightsMissing
from farm.records.request import SamplingParams
from farm.records.rollout import Outcome
from farm.records.trajectory import ROLE, UNTRAINED, Message, ModelCall
from workers.plugins.interfaces import MAX_TOKENS as ROLE_MAX_TOKENS
from workers.plugins.interfaces import AgentContext, ChatModel, Completion, Delta, OnDelta, Policy
from workers.policy.answer_form import GUIDED, FormedSampling
from workers.policy.gateway.conversations import Conversations, HashedConversation, RecentAnswers
from workers.policy.gateway.dialects.model_api import BadRequest, ParsedRequest
from workers.policy.generation import FormUnsupported, ImagesRefused, ImageUnreadable, LogprobsMissing
from workers.policy.message_images import digests_of, joined, parts_of
from workers.policy.recording import Stopwatch, as_applied, conversation_repeats, model_call
from workers.policy.tokens.long_texts import LongTexts
from workers.policy.tokens.messages import n_chars
from workers.policy.tool_calls import deltas

_JOIN = "\n\n"
T = TypeVar("T")
_OF_THE_FARM = frozenset({ROLE, UNTRAINED, GUIDED})
"""Labels that requests may not set: with them a program could exclude calls of the policy from training."""
_NO_LOGPROBS = "the model's engine gives no log-probabilities"
_LONG_CHARS = 1_000_000
_MANY_MESSAGES = 2000
_MAX_FAILED = 32
"""Number of unanswered conversations after which no call is answered: each is held in memory."""


def one_leading(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with at most one system message, the first.

    A user message next to a converted system message is joined with it, as many templates require alternating roles.
    """
    leading = list(takewhile(_is_system, messages))
    merged: list[Message] = []
    if leading:
        merged.append({"role": "system", "content": _JOIN.join(message["content"] for message in leading)})
    moved = False
    for message in messages[len(leading) :]:
        was_moved, moved = moved, _is_system(message)
        ready: Message = {**message, "role": "user"} if moved else message
        if (moved or was_moved) and ready["role"] == "user" and merged and merged[-1]["role"] == "user":
            merged[-1] = {**merged[-1], "content": joined([merged[-1]["content"], ready["content"]], _JOIN)}
        else:
            merged.append(ready)
    return merged


def _is_system(message: Message) -> bool:
    return bool(message.get("role") == "system")


@dataclass(frozen=True, slots=True)
class TokenBudget:
    """Maximum tokens of an answer, and of a prompt with its answer; None if unknown."""

    output_tokens: int
    context_tokens: int | None

    @staticmethod
    def of(policy: Policy, output_tokens: int) -> TokenBudget:
        context_tokens = getattr(policy, "context_tokens", None)
        fits = output_tokens if context_tokens is None else min(output_tokens, context_tokens)
        return TokenBudget(fits, context_tokens)

    def fields(self) -> dict[str, Any]:
        """Return the fields of a listed model, of all vendors; unknown limits are omitted."""
        output = dict.fromkeys(("max_output_tokens", "max_tokens", "outputTokenLimit"), self.output_tokens)
        if self.context_tokens is None:
            return output
        context = ("context_length", "context_window", "max_model_len", "max_input_tokens", "inputTokenLimit")
        return {**output, **dict.fromkeys(context, self.context_tokens)}


class GatewayCalls:
    """The model calls of one rollout; any number may run at once, as agents have sub-agents.

    Concurrent calls may together exceed `max_tokens` by the number of tokens that each was allowed.
    """

    def __init__(self, context: AgentContext) -> None:
        self._context = context
        self._branches = Conversations()
        self._failures: dict[bytes, Exception] = {}
        self._recent = RecentAnswers()
        self._full: LimitReached | None = None
        self._end: Exception | None = None
        self._n_begun = 0
        self._n_sampled = 0
        self._long_texts = LongTexts()
        self._writing: set[asyncio.Future[Any]] = set()
        self._kept: set[str] = set()
        self._keeping = asyncio.Lock()
        self._n_recorded = 0
        self.n_answered = 0
        self.n_chars_per_token = 4.0
        self.begun = asyncio.Event()
        """Set once a request has arrived."""
        self.over = asyncio.Event()
        """Set once no further call will be answered."""

    async def complete(self, request: ParsedRequest, on_delta: OnDelta | None = None) -> Completion:
        """Answer a request and record it. Raises Policy's errors, and LimitReached beyond the rollout's limits."""
        self.begun.set()
        known = await self._recent.known(request.digest, request.is_retry, self.settle)
        if known is not None:
            # A retry after a lost reply: the same turn must not be sampled, or trained, twice.
            _send(known, on_delta)
            return _with_allowed(request, known)
        with self._recent.answering(request.digest):
            answer = await self._answer(request, on_delta)
        self._recent.keep(request.digest, answer)
        return _with_allowed(request, answer)

    async def _answer(self, request: ParsedRequest, on_delta: OnDelta | None) -> Completion:
        conversation = await self._read(request, lambda: HashedConversation(one_leading(request.messages)))
        await self._keep_images(conversation)
        if (model := self._context.models.get(request.model)) is not None:
            if request.logprobs:
                raise BadRequest(_NO_LOGPROBS, "logprobs")
            max_tokens = self._begin(request, None)
            return await self._answered_by(model, request, conversation, max_tokens, on_delta)
        most = self._context.limits.max_repeats
        repeats = most and await self._read(request, lambda: conversation_repeats(conversation.messages, most))
        max_tokens = self._begin(request, self._context.sampling.max_tokens, repeats=bool(repeats))
        try:
            completion = await self._answered(request, conversation, max_tokens, on_delta)
        except LogprobsMissing:
            raise BadRequest(_NO_LOGPROBS, "logprobs") from None
        except ImageUnreadable as error:
            raise BadRequest(f"an image of the conversation is unreadable: {error.reason}", "messages") from None
        except FormUnsupported:
            field = "tool_choice" if request.tool_choice == "required" else "response_format"
            raise BadRequest("the model cannot answer in this form, and the batch requires it", field) from None
        except LimitReached as limit:
            self._reached(limit)
            raise
        except Exception as error:
            self._failed(conversation.digest, error)
            raise
        # An earlier failure of the same request does not count once a retry is answered.
        self._failures.pop(conversation.digest, None)
        shown = _with_allowed(request, completion)
        if shown is not completion:
            # Stored in the form in which the client will send it back.
            self._branches.add(conversation, shown.response)
        return completion

    def went_unread(self, request: ParsedRequest, completion: Completion) -> None:
        """Keep an answer whose client disconnected before it was sent completely, for its retry."""
        self._recent.went_unread(request.digest, completion)

    @property
    def image_rule(self) -> str:
        """The batch's rule for images in requests, `AgentRequests.images`."""
        return self._context.agent_requests.images

    @property
    def roles(self) -> Sequence[str]:
        """The model names that are answered by role models instead of the policy."""
        return sorted(self._context.models)

    @property
    def token_budget(self) -> TokenBudget:
        """The tokens available to the next call."""
        left = max(0, self._context.limits.max_tokens - self._n_sampled)
        return TokenBudget.of(self._context.policy, min(left, self._context.sampling.max_tokens or left))

    @property
    def limit(self) -> LimitReached | None:
        """The limit that ended the conversation; None if it went on, such as after the client shortened it."""
        return self._end if isinstance(self._end, LimitReached) else self._full

    @property
    def failure(self) -> Exception | None:
        """The error of a request that no retry answered; None if there is none."""
        if self._end is not None and not isinstance(self._end, LimitReached):
            return self._end
        return next(iter(self._failures.values()), None)

    async def settle(self) -> None:
        """Wait until all answers are recorded."""
        await asyncio.gather(*self._writing, return_exceptions=True)

    async def _read(self, request: ParsedRequest, reading: Callable[[], T]) -> T:
        """Return the result of reading a conversation; a long one in a thread, as all rollouts share the event loop."""
        is_long = sum(len(message["content"]) for message in request.messages) > _LONG_CHARS
        if is_long or len(request.messages) > _MANY_MESSAGES:
            return await self._long_texts.run(reading)
        return reading()

    def _begin(self, request: ParsedRequest, most: int | None, *, repeats: bool = False) -> int:
        """Count a call; return how many tokens it may sample, at most `most`.

        `repeats`: the policy has repeated itself as often as it may. Raises LimitReached, or the rollout's error.
        """
        if self._end is not None:
            # A repeatedly raised exception would keep every frame of its tracebacks alive.
            raise self._end.with_traceback(None)
        limits = self._context.limits
        if repeats:
            # Before the number of turns, as the last one may be the repetition.
            raise self._ended(LimitReached(Outcome.REPEATING, "the policy repeats itself"))
        if self._n_begun >= limits.max_turns:
            raise self._ended(LimitReached(Outcome.MAX_TURNS, f"all {limits.max_turns} turns are taken"))
        left = limits.max_tokens - self._n_sampled
        if left <= 0:
            raise self._ended(LimitReached(Outcome.MAX_TOKENS, f"{self._n_sampled} tokens are sampled"))
        self._n_begun += 1
        wanted = (most, request.max_tokens)
        return min([left, *(each for each in wanted if each is not None)])

    async def _answered(
        self, request: ParsedRequest, conversation: HashedConversation, max_tokens: int, on_delta: OnDelta | None
    ) -> Completion:
        sampling = self._sampling(request)
        watch = Stopwatch()
        shown = _Shown(on_delta)
        try:
            completion = await self._context.policy.complete(
                conversation.messages, request.tools, sampling, max_tokens, shown if on_delta is not None else None
            )
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and shown.n_chars:
                # A client that disconnects after reading part of the answer has used a turn.
                self._n_sampled += math.ceil(shown.n_chars / self.n_chars_per_token)
            else:
                # Not a turn: the client may retry.
                self._n_begun -= 1
            raise
        applied = {**as_applied(sampling, max_tokens), "asked": request.requested_params}
        completion.labels = self._labels(request, conversation) | completion.labels
        call = self._call(request, conversation, completion, watch, applied)
        self._took(request, conversation, completion, max_tokens)
        await self._recorded(request, call, completion)
        return completion

    async def _answered_by(
        self,
        model: ChatModel,
        request: ParsedRequest,
        conversation: HashedConversation,
        max_tokens: int,
        on_delta: OnDelta | None,
    ) -> Completion:
        """Answer by the model of a role, and record the call without ids: it is not the policy's and never trains.

        It counts against the rollout's limits like any other.
        """
        wanted = None if request.max_tokens is None and max_tokens > ROLE_MAX_TOKENS else max_tokens
        sampling = self._sampling(request).model_copy(update={"max_tokens": wanted})
        watch = Stopwatch()
        key = b"%s %s" % (conversation.digest, request.model.encode())
        try:
            answered = await model.answer(conversation.messages, request.tools, sampling)
        except BaseException as error:
            # Not a turn: the client may retry.
            self._n_begun -= 1
            if isinstance(error, EngineError) and error.retryable:
                # Otherwise the program's request is at fault.
                self._failed(key, error)
            raise
        self._failures.pop(key, None)
        self._n_sampled += answered.n_response_tokens
        completion = replace(answered, prompt_ids=None, response_ids=None, response_logprobs=None, versions=())
        completion.labels = self._labels(request, conversation) | {ROLE: request.model}
        call = self._call(request, conversation, completion, watch, {"asked": request.requested_params})
        self._branches.add(conversation, completion.response)
        await self._recorded(request, call, completion)
        _send(completion, on_delta)
        return completion

    async def _keep_images(self, conversation: HashedConversation) -> None:
        """Keep each image of a conversation once with the rollout, before an engine gets it. Raises AgentError."""
        for part in parts_of(conversation.messages) if self._end is None else ():
            picture = part.picture
            async with self._keeping:
                if picture.sha256 in self._kept:
                    continue
                if not await self._uncut(self._context.keep(self.n_answered, picture.artefact)):
                    raise self._ended(
                        AgentError(
                            f"{self._context.rollout_id}: an image of {len(picture.data)} bytes cannot be kept, and a "
                            "training row must not refer to a missing image: raise FARM_ARTEFACTS_MB, or set "
                            "agent_requests.images to `text`",
                            retryable=False,
                        )
                    )
                self._kept.add(picture.sha256)

    def _call(
        self,
        request: ParsedRequest,
        conversation: HashedConversation,
        completion: Completion,
        watch: Stopwatch,
        sampling: dict[str, Any],
    ) -> ModelCall:
        index, self._n_recorded = self._n_recorded, self._n_recorded + 1
        new, images = self._branches.new(conversation), digests_of(conversation.messages)
        return model_call(index, new, completion, watch, sampling, request.tools, images)

    def _labels(self, request: ParsedRequest, conversation: HashedConversation) -> dict[str, str]:
        """Return the labels that a request sets, and its counts of earlier answers and of tools."""
        depth = sum(message.get("role") == "assistant" for message in conversation.messages)
        labels = {name: value for name, value in request.labels.items() if name not in _OF_THE_FARM}
        return labels | {"depth": str(depth), "tools": str(len(request.tools))}

    def _sampling(self, request: ParsedRequest) -> SamplingParams:
        sampling, forms = self._context.sampling, self._context.agent_requests.forms
        stops = {"stop": tuple(dict.fromkeys((*sampling.stop, *request.stop)))}
        free = request.tool_choice == "auto" and request.answer_schema is None
        if (free or (forms == "ignore" and request.tool_choice != "none")) and not request.logprobs:
            return sampling.model_copy(update=stops)
        return FormedSampling(
            **sampling.model_copy(update=stops).model_dump(),
            tool_choice=None if request.tool_choice == "auto" else request.tool_choice,
            tools_allowed=request.tools_allowed if request.tool_choice == "required" else (),
            answer_schema=request.answer_schema if forms != "ignore" else None,
            spelled=request.logprobs,
            required=forms == "require",
        )

    def _took(
        self, request: ParsedRequest, conversation: HashedConversation, completion: Completion, max_tokens: int
    ) -> None:
        self.n_answered += 1
        self._branches.add(conversation, completion.response)
        self._n_sampled += completion.n_response_tokens
        self._full = None
        if completion.n_prompt_tokens:
            self.n_chars_per_token = max(1.0, n_chars(request.messages, request.tools) / completion.n_prompt_tokens)
        if completion.finish_reason != "length":
            return
        if self._n_sampled >= self._context.limits.max_tokens:
            self._ended(LimitReached(Outcome.MAX_TOKENS, f"{self._n_sampled} tokens are sampled"))
        elif completion.n_response_tokens < max_tokens:
            # An engine that stops before the allowed length has run out of context.
            self._full = LimitReached(Outcome.CONTEXT_FULL, "the answer was truncated, as the context is full")

    async def _recorded(self, request: ParsedRequest, call: ModelCall, completion: Completion) -> None:
        """Record a call; if its client disconnects meanwhile, keep the answer."""
        try:
            await self._uncut(self._context.record(call))
        except asyncio.CancelledError:
            self.went_unread(request, completion)
            raise

    async def _uncut(self, writing: Awaitable[T]) -> T:
        task = asyncio.ensure_future(writing)
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        return await asyncio.shield(task)

    def _reached(self, limit: LimitReached) -> None:
        if limit.outcome is Outcome.CONTEXT_FULL:
            self._full = limit
        else:
            self._ended(limit)

    def _failed(self, conversation: bytes, error: Exception) -> None:
        self._failures[conversation] = error
        if isinstance(error, StaleRollout | WeightsMissing | ImagesRefused) or len(self._failures) > _MAX_FAILED:
            self._ended(error)

    def _ended(self, reason: Exception) -> Exception:
        self._end = self._end or reason
        self.over.set()
        return reason


def _with_allowed(request: ParsedRequest, completion: Completion) -> Completion:
    """Return the answer without calls of tools that the request does not allow; the record has all that was sampled."""
    if request.tool_choice != "auto" or not request.tools_allowed:
        return completion
    calls = completion.response.get("tool_calls") or []
    kept = [call for call in calls if call["function"]["name"] in request.tools_allowed]
    if len(kept) == len(calls):
        return completion
    response = {name: value for name, value in completion.response.items() if name != "tool_calls"}
    return replace(completion, response=response | ({"tool_calls": kept} if kept else {}))


def _send(completion: Completion, on_delta: OnDelta | None) -> None:
    for delta in deltas(completion.response) if on_delta is not None else ():
        on_delta(delta)  # type: ignore[misc]


class _Shown:
    def __init__(self, on_delta: OnDelta | None) -> None:
        self._on_delta = on_delta
        self.n_chars = 0

    def __call__(self, delta: Delta) -> None:
        self.n_chars += len(delta.text)
        if self._on_delta is not None:
            self._on_delta(delta)
